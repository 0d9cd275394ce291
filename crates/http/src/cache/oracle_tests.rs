//! The crate http-cache-semantics (a port of a widely used JavaScript library, RFC 7234) as an oracle.
//!
//! The cases keep clear of where this cache differs on purpose:
//! - the oracle has no apparent age (RFC 9111 §4.2.3), no response delay and no cap of heuristic lifetimes, so `Date` is
//!   the time of reception and nothing was modified more than ten days before;
//! - it gives `Set-Cookie` and `proxy-revalidate` a lifetime of 0, where RFC 9111 asks for neither;
//! - it understands fewer status codes;
//! - it takes an invalid `Age` for 0 and the last of several equal directives;
//! - it has no `must-understand`, `CDN-Cache-Control` and does not mind to guess a lifetime for a request that
//!   identifies its client;
//! - it says that what cannot be validated and is stale at once is storable.

use std::time::{Duration, SystemTime};

use http_cache_semantics::{BeforeRequest, CacheOptions, CachePolicy};
use proptest::prelude::*;

use super::testing::{OwnedFields, request, response};
use super::{NotStorable, Policy, RequestDirectives, Reuse};
use crate::date;
use crate::head::Method;

const NOW_S: u64 = 1_800_000_000;

type Line = (&'static str, String);

fn response_line() -> impl Strategy<Value = Line> {
    let number = 0..200_u32;
    prop_oneof![
        4 => (prop_oneof![Just("max-age"), Just("s-maxage")], number.clone())
            .prop_map(|(name, number)| ("cache-control", format!("{name}={number}"))),
        2 => prop_oneof![
            Just("public"), Just("private"), Just("no-store"), Just("no-cache"), Just("must-revalidate"), Just("x=\"max-age=7\""),
        ]
        .prop_map(|directive| ("cache-control", directive.to_owned())),
        1 => number.clone().prop_map(|number| ("age", number.to_string())),
        1 => number.clone().prop_map(|number| ("expires", http_date(NOW_S + u64::from(number) - 50))),
        2 => (0..86_400 * 10_u64).prop_map(|ago_s| ("last-modified", http_date(NOW_S - ago_s))),
    ]
}

fn request_line() -> impl Strategy<Value = Line> {
    let number = 0..100_u32;
    prop_oneof![
        (prop_oneof![Just("max-age"), Just("min-fresh")], number)
            .prop_map(|(name, number)| ("cache-control", format!("{name}={number}"))),
        prop_oneof![Just("no-cache"), Just("foo")]
            .prop_map(|directive| ("cache-control", directive.to_owned())),
        Just(("pragma", "no-cache".to_owned())),
        Just(("authorization", "Basic x".to_owned())),
    ]
}

fn http_date(unix_s: u64) -> String {
    String::from_utf8_lossy(&date::format(unix_s)).into_owned()
}

/// One line a name: the oracle and this cache differ in how they treat repetitions of anything but Cache-Control.
fn joined(lines: Vec<Line>) -> Vec<(&'static str, String)> {
    let mut out: Vec<(&'static str, String)> = Vec::new();
    for (name, value) in lines {
        let directive = value.split('=').next().unwrap_or_default().to_owned();
        match out.iter_mut().find(|(known, _)| *known == name) {
            Some((_, joined)) if name == "cache-control" && !joined.contains(&directive) => {
                joined.push_str(", ");
                joined.push_str(&value);
            }
            Some(_) => {}
            None => out.push((name, value)),
        }
    }
    out
}

fn oracle(asked: &[Line], status: u16, answered: &[Line]) -> CachePolicy {
    let mut request = http::Request::builder().uri("http://a.example/");
    for (name, value) in asked {
        request = request.header(*name, value);
    }
    let mut response = http::Response::builder().status(status);
    for (name, value) in answered {
        response = response.header(*name, value);
    }
    let options = CacheOptions { shared: true, ..CacheOptions::default() };
    CachePolicy::new_options(&request.body(()).unwrap(), &response.body(()).unwrap(), time(NOW_S), options)
}

fn time(unix_s: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(unix_s)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn storing_and_freshness_agree(
        asked in prop::collection::vec(request_line(), 0..2),
        status in prop_oneof![Just(200_u16), Just(301), Just(302), Just(404), Just(307), Just(206), Just(304)],
        answered in prop::collection::vec(response_line(), 0..6),
        later_s in 0..300_u64,
    ) {
        let (asked, mut answered) = (joined(asked), joined(answered));
        answered.push(("date", http_date(NOW_S)));
        answered.push(("etag", "\"a\"".to_owned()));
        let oracle = oracle(&asked, status, &answered);
        let (asked_fields, answered_fields) = (OwnedFields::new(&asked), OwnedFields::new(&answered));
        let ours = Policy::new(
            &request(Method::Get, b"/", &asked_fields),
            &response(status, &answered_fields),
            NOW_S,
            NOW_S,
        );
        // The oracle leaves partial and 304 responses to its caller.
        prop_assert_eq!(ours.is_ok(), oracle.is_storable() && !matches!(status, 206 | 304), "{:?}", ours);
        let Ok(ours) = ours else { return Ok(()) };
        prop_assume!(!(ours.is_heuristic() && asked.iter().any(|(name, _)| *name == "authorization")));
        let now_s = NOW_S + later_s;
        prop_assert_eq!(ours.age_s(now_s), oracle.age(time(now_s)).as_secs());
        let directives = RequestDirectives::parse(&asked_fields.view());
        let mut again = http::Request::builder().uri("http://a.example/");
        for (name, value) in &asked {
            again = again.header(*name, value);
        }
        let theirs = matches!(
            oracle.before_request(&again.body(()).unwrap(), time(now_s)),
            BeforeRequest::Fresh(_)
        );
        let reuse = ours.reuse(&directives, now_s);
        prop_assert_eq!(matches!(reuse, Reuse::Fresh { .. }), theirs, "{:?}", reuse);
        if !answered.iter().any(|(_, value)| value.contains("no-cache")) {
            prop_assert_eq!(ours.ttl_s(now_s).max(0) as u64, oracle.time_to_live(time(now_s)).as_secs());
        }
    }
}

#[test]
fn the_oracle_differs_where_the_list_says() {
    let without_validator = [("cache-control", "max-age=0".to_owned()), ("date", http_date(NOW_S))];
    assert!(oracle(&[], 200, &without_validator).is_storable());
    let fields = OwnedFields::new(&without_validator);
    let none = OwnedFields::new::<&str, &str>(&[]);
    let ours = Policy::new(&request(Method::Get, b"/", &none), &response(200, &fields), NOW_S, NOW_S);
    assert_eq!(ours, Err(NotStorable::Useless));
}
