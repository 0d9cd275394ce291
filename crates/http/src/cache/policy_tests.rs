use super::*;
use crate::cache::testing::{OwnedFields, request, response};
use proptest::prelude::*;

/// Sun, 06 Nov 1994 08:49:37 GMT
const NOW_S: u64 = 784_111_777;
const NOW: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
const HUNDRED_SECONDS_AGO: &str = "Sun, 06 Nov 1994 08:47:57 GMT";
const IN_A_MINUTE: &str = "Sun, 06 Nov 1994 08:50:37 GMT";
const LONG_AGO: &str = "Thu, 01 Jan 1970 00:00:00 GMT";

type Lines<'a> = &'a [(&'a str, &'a str)];

fn policy_of(asked: Lines<'_>, status: u16, answered: Lines<'_>) -> Result<Policy, NotStorable> {
    let (asked, answered) = (OwnedFields::new(asked), OwnedFields::new(answered));
    Policy::new(&request(Method::Get, b"/", &asked), &response(status, &answered), NOW_S, NOW_S)
}

fn stored(answered: Lines<'_>) -> Policy {
    policy_of(&[], 200, answered).unwrap()
}

fn cc(value: &str) -> Policy {
    stored(&[("Cache-Control", value), ("ETag", "\"a\"")])
}

fn asks(value: &str) -> RequestDirectives {
    RequestDirectives::parse(&OwnedFields::new(&[("Cache-Control", value)]).view())
}

const NOTHING: RequestDirectives = RequestDirectives {
    no_cache: false,
    no_store: false,
    only_if_cached: false,
    max_age_s: None,
    min_fresh_s: None,
    max_stale_s: None,
    stale_if_error_s: None,
};

#[test]
fn what_must_not_be_stored_is_refused_with_its_reason() {
    let tagged = |value| [("Cache-Control", value), ("ETag", "\"a\"")];
    assert_eq!(policy_of(&[], 200, &tagged("no-store, max-age=60")), Err(NotStorable::NoStore));
    assert_eq!(policy_of(&[], 200, &tagged("private, max-age=60")), Err(NotStorable::Private));
    assert_eq!(policy_of(&[], 200, &tagged("private=\"x\", max-age=60")), Err(NotStorable::Private));
    assert_eq!(
        policy_of(&[("Cache-Control", "no-store")], 200, &tagged("max-age=60")),
        Err(NotStorable::RequestNoStore)
    );
    for status in [101, 206, 304, 408, 413, 431] {
        assert_eq!(policy_of(&[], status, &tagged("max-age=60")), Err(NotStorable::Status), "{status}");
    }
    let long = "x".repeat(2048);
    assert_eq!(policy_of(&[("Cookie", &long)], 400, &tagged("max-age=60")), Err(NotStorable::Status));
    assert!(policy_of(&[("Cookie", &long)], 404, &tagged("max-age=60")).is_ok());
    assert!(policy_of(&[], 400, &tagged("max-age=60")).is_ok());
    assert_eq!(
        policy_of(&[], 200, &[("Cache-Control", "max-age=60"), ("Vary", "a, *")]),
        Err(NotStorable::VaryAny)
    );
    assert_eq!(policy_of(&[], 302, &[("ETag", "\"a\"")]), Err(NotStorable::NoPermission));
    assert_eq!(policy_of(&[], 200, &[]), Err(NotStorable::Useless));
    assert_eq!(policy_of(&[], 200, &[("Cache-Control", "max-age=0")]), Err(NotStorable::Useless));
    assert_eq!(policy_of(&[], 200, &[("Cache-Control", "no-cache, max-age=9")]), Err(NotStorable::Useless));
    // What may be served stale is of use, unless it may not.
    for grant in ["stale-while-revalidate=9", "stale-if-error=9"] {
        let policy = |more: &str| {
            policy_of(&[], 200, &[("Cache-Control", format!("max-age=0, {grant}{more}").as_str())])
        };
        assert!(policy("").is_ok(), "{grant}");
        for strict in [", must-revalidate", ", proxy-revalidate", ", s-maxage=0", ", no-cache"] {
            assert_eq!(policy(strict), Err(NotStorable::Useless), "{grant}{strict}");
        }
    }
    assert_eq!(
        policy_of(&[], 200, &[("Last-Modified", LONG_AGO), ("Set-Cookie", "a=b")]),
        Err(NotStorable::SetCookie)
    );
}

#[test]
fn only_get_and_head_are_stored() {
    let (none, fields) =
        (OwnedFields::new::<&str, &str>(&[]), OwnedFields::new(&[("Cache-Control", "max-age=60")]));
    for (method, storable) in [
        (Method::Get, true),
        (Method::Head, true),
        (Method::Post, false),
        (Method::Options, false),
        (Method::Other, false),
    ] {
        let policy = Policy::new(&request(method, b"/", &none), &response(200, &fields), NOW_S, NOW_S);
        assert_eq!(policy.is_ok(), storable, "{method:?}");
    }
}

#[test]
fn responses_to_credentials_need_permission_to_be_shared() {
    let with = |value| policy_of(&[("Authorization", "Basic x")], 200, &[("Cache-Control", value)]).err();
    assert_eq!(with("max-age=60"), Some(NotStorable::Authorization));
    for value in ["max-age=60, public", "max-age=60, must-revalidate", "s-maxage=60"] {
        assert_eq!(with(value), None, "{value}");
    }
}

#[test]
fn must_understand_replaces_no_store_for_known_codes() {
    let with = |status, value| policy_of(&[], status, &[("Cache-Control", value)]).err();
    assert_eq!(with(200, "max-age=60, must-understand, no-store"), None);
    assert_eq!(with(599, "max-age=60, must-understand"), Some(NotStorable::NotUnderstood));
    assert_eq!(with(599, "max-age=60"), None);
}

#[test]
fn the_most_specific_lifetime_counts() {
    let ttl = |lines: Lines<'_>| stored(lines).ttl_s(NOW_S);
    let tag = ("ETag", "\"a\"");
    assert_eq!(ttl(&[("Cache-Control", "max-age=10, s-maxage=20")]), 20);
    assert_eq!(ttl(&[("Cache-Control", "max-age=10"), ("Expires", IN_A_MINUTE), ("Date", NOW)]), 10);
    assert_eq!(ttl(&[("Expires", IN_A_MINUTE), ("Date", NOW)]), 60);
    assert_eq!(ttl(&[("Expires", IN_A_MINUTE)]), 60);
    assert_eq!(ttl(&[("Expires", IN_A_MINUTE), ("Date", "foo")]), 60);
    assert_eq!(ttl(&[("Expires", IN_A_MINUTE), ("Expires", IN_A_MINUTE)]), 60);
    assert_eq!(ttl(&[("Expires", IN_A_MINUTE), ("Expires", NOW), tag]), 0);
    assert_eq!(ttl(&[("Expires", "0"), ("Last-Modified", LONG_AGO)]), 0);
    assert_eq!(ttl(&[("Expires", NOW), ("Date", IN_A_MINUTE), tag]), 0);
    assert_eq!(ttl(&[("Cache-Control", "max-age=99999999999")]), 1 << 31);
    assert_eq!(
        ttl(&[("CDN-Cache-Control", "max-age=30"), ("Expires", "0"), ("Cache-Control", "no-store")]),
        30
    );
    assert_eq!(ttl(&[("CDN-Cache-Control", "must-revalidate"), ("Expires", IN_A_MINUTE), tag]), 0);
}

/// One client's page was given to others that asked for what is stale, and to all when the upstream failed.
#[test]
fn what_says_nothing_is_not_stored_for_a_client_that_is_identified_and_never_served_stale_for_others() {
    let tag = ("ETag", "\"a\"");
    let modified = ("Last-Modified", HUNDRED_SECONDS_AGO);
    for asked in [("Cookie", "a=b"), ("Authorization", "Basic YTpi")] {
        for validator in [tag, modified] {
            let refusal = policy_of(&[asked], 200, &[validator]).unwrap_err();
            assert!(refusal.is_by_request(), "{asked:?}, {validator:?}: {refusal:?}");
        }
    }
    for said in ["max-age=0", "public", "no-cache", "must-revalidate", "proxy-revalidate", "s-maxage=1"] {
        let policy = policy_of(&[("Cookie", "a=b")], 200, &[tag, ("Cache-Control", said)]);
        assert!(policy.is_ok(), "{said}: {policy:?}");
    }
    let asks =
        RequestDirectives { max_stale_s: Some(1000), stale_if_error_s: Some(1000), ..Default::default() };
    for (lines, may) in [
        (&[tag][..], false),
        (&[tag, ("Cache-Control", "max-age=0")], false),
        (&[tag, ("Cache-Control", "max-age=1")], true),
        (&[tag, modified], true),
    ] {
        let policy = policy_of(&[], 200, lines).unwrap();
        let later_s = NOW_S + 20;
        assert_eq!(matches!(policy.reuse(&asks, later_s), Reuse::StaleAllowed { .. }), may, "{lines:?}");
        assert_eq!(policy.may_serve_stale_on_error(&asks, later_s), may, "{lines:?}");
        assert_eq!(policy.may_serve_stale_when_disconnected(&asks, later_s), may, "{lines:?}");
    }
    // The origin may allow it.
    let policy = policy_of(&[], 200, &[tag, ("Cache-Control", "max-age=0, stale-if-error=30")]).unwrap();
    assert!(policy.may_serve_stale_on_error(&NOTHING, NOW_S + 20));
    assert!(policy.may_serve_stale_when_disconnected(&NOTHING, NOW_S + 20));
}

#[test]
fn heuristic_lifetimes_are_a_tenth_up_to_a_day() {
    let ttl = |asked: Lines<'_>, status, lines: Lines<'_>| {
        policy_of(asked, status, lines).map(|policy| policy.ttl_s(NOW_S))
    };
    let modified = ("Last-Modified", HUNDRED_SECONDS_AGO);
    assert_eq!(ttl(&[], 200, &[modified, ("Date", NOW)]), Ok(10));
    assert_eq!(ttl(&[], 404, &[modified]), Ok(10));
    assert_eq!(ttl(&[], 200, &[("Last-Modified", LONG_AGO)]), Ok(86_400));
    assert_eq!(ttl(&[], 200, &[("Last-Modified", IN_A_MINUTE)]), Ok(0));
    assert_eq!(ttl(&[], 403, &[modified]), Err(NotStorable::NoPermission));
    assert_eq!(ttl(&[], 599, &[modified, ("Cache-Control", "public")]), Ok(10));
    assert_eq!(ttl(&[("Cookie", "a=b")], 200, &[modified, ("Cache-Control", "must-revalidate")]), Ok(0));
    assert_eq!(ttl(&[("Cookie", "a=b")], 200, &[modified, ("Cache-Control", "public")]), Ok(10));
    let credentials = ("Authorization", "Basic x");
    assert_eq!(ttl(&[credentials], 200, &[modified, ("Cache-Control", "must-revalidate")]), Ok(0));
    assert_eq!(ttl(&[credentials], 200, &[modified, ("Cache-Control", "public")]), Ok(10));
    assert_eq!(ttl(&[], 200, &[modified, ("Pragma", "no-cache")]), Ok(0));
    assert!(policy_of(&[], 200, &[modified]).unwrap().is_heuristic());
    assert!(!cc("max-age=1").is_heuristic());
}

#[test]
fn ages_are_the_larger_of_what_clocks_and_caches_say() {
    let fields =
        OwnedFields::new(&[("Cache-Control", "max-age=600"), ("Age", "30"), ("Date", HUNDRED_SECONDS_AGO)]);
    let none = OwnedFields::new::<&str, &str>(&[]);
    let policy = |request_time_s, fields: &OwnedFields| {
        Policy::new(&request(Method::Get, b"/", &none), &response(200, fields), request_time_s, NOW_S)
            .unwrap()
    };
    assert_eq!(policy(NOW_S, &fields).age_s(NOW_S + 7), 107);
    assert_eq!(policy(NOW_S - 80, &fields).age_s(NOW_S), 110);
    assert_eq!(
        policy(NOW_S, &fields).age_s(NOW_S - 5),
        100,
        "a clock that goes back a little does not make younger"
    );
    assert_eq!(policy(NOW_S + 500, &fields).age_s(NOW_S), 100);
    assert_eq!(policy(NOW_S, &fields).date_s(), NOW_S - 100);
    assert_eq!(cc("max-age=1").date_s(), NOW_S);
    assert_eq!(stored(&[("Age", "99999999999"), ("ETag", "x")]).age_s(NOW_S), 1 << 31);
}

#[test]
fn of_several_ages_the_first_counts_and_what_is_no_number_is_ignored() {
    let age_s = |lines: &[(&str, &str)]| stored(lines).age_s(NOW_S);
    for (value, expected_s) in [
        ("abc", 0),
        ("-1", 0),
        ("7.0", 0),
        ("", 0),
        ("0, 7", 0),
        ("7,0", 7),
        ("7 , 0", 7),
        ("7;x=1", 7),
        ("x, 7", 0),
    ] {
        assert_eq!(age_s(&[("Age", value), ("ETag", "x")]), expected_s, "{value}");
    }
    assert_eq!(age_s(&[("Age", "7"), ("Age", "0"), ("ETag", "x")]), 7);
    assert_eq!(age_s(&[("Age", "0"), ("Age", "7"), ("ETag", "x")]), 0);
}

#[test]
fn a_response_is_fresh_until_its_lifetime_is_reached() {
    let policy = cc("max-age=10");
    assert_eq!(policy.reuse(&NOTHING, NOW_S + 9), Reuse::Fresh { age_s: 9 });
    assert_eq!(policy.reuse(&NOTHING, NOW_S + 10), Reuse::Validate(Validation::Stale));
    assert_eq!((policy.ttl_s(NOW_S + 10), policy.ttl_s(NOW_S + 15)), (0, -5));
    assert_eq!(cc("no-cache, max-age=10").reuse(&NOTHING, NOW_S), Reuse::Validate(Validation::Stale));
}

#[test]
fn requests_may_ask_for_more_than_fresh() {
    let reuse = |value, later_s| cc("max-age=10").reuse(&asks(value), NOW_S + later_s);
    assert_eq!(reuse("no-cache", 0), Reuse::Validate(Validation::Request));
    assert_eq!(reuse("max-age=5", 5), Reuse::Fresh { age_s: 5 });
    assert_eq!(reuse("max-age=5", 6), Reuse::Validate(Validation::Request));
    assert_eq!(reuse("max-age=0", 0), Reuse::Fresh { age_s: 0 });
    assert_eq!(reuse("min-fresh=5", 5), Reuse::Fresh { age_s: 5 });
    assert_eq!(reuse("min-fresh=5", 6), Reuse::Validate(Validation::Request));
    assert_eq!(reuse("max-age=5", 20), Reuse::Validate(Validation::Stale));
}

#[test]
fn stale_responses_are_used_where_either_side_allows_it() {
    let reuse = |answered: &str, asked: &str, later_s: u64| cc(answered).reuse(&asks(asked), NOW_S + later_s);
    assert_eq!(
        reuse("max-age=10, stale-while-revalidate=5", "", 15),
        Reuse::StaleWhileRevalidate { age_s: 15 }
    );
    assert_eq!(reuse("max-age=10, stale-while-revalidate=5", "", 16), Reuse::Validate(Validation::Stale));
    assert_eq!(reuse("max-age=10, stale-while-revalidate=0", "", 10), Reuse::Validate(Validation::Stale));
    assert_eq!(reuse("max-age=10", "max-stale=5", 15), Reuse::StaleAllowed { age_s: 15 });
    assert_eq!(reuse("max-age=10", "max-stale=5", 16), Reuse::Validate(Validation::Stale));
    assert_eq!(reuse("max-age=10", "max-stale", 9999), Reuse::StaleAllowed { age_s: 9999 });
    for strict in ["must-revalidate", "proxy-revalidate", "s-maxage=10", "no-cache"] {
        let answered = format!("max-age=10, stale-while-revalidate=5, {strict}");
        assert_eq!(reuse(&answered, "max-stale", 12), Reuse::Validate(Validation::Stale), "{strict}");
    }
}

#[test]
fn failures_allow_stale_within_what_was_said() {
    let on_error = |answered: &str, asked: &str, later_s: u64| {
        cc(answered).may_serve_stale_on_error(&asks(asked), NOW_S + later_s)
    };
    assert!(on_error("max-age=10, stale-if-error=5", "", 15));
    assert!(!on_error("max-age=10, stale-if-error=5", "", 16));
    assert!(on_error("max-age=10, stale-if-error=5", "stale-if-error=9", 19));
    assert!(on_error("max-age=10", "stale-if-error=9", 19));
    assert!(!on_error("max-age=10", "", 11));
    // What a request prefers is to ask the origin, which was in vain.
    for asked in ["no-cache", "max-age=0", "max-age=1"] {
        assert!(on_error("max-age=10, stale-if-error=5", asked, 12), "{asked}");
        assert!(!on_error("max-age=10, stale-if-error=5", asked, 16), "{asked}");
    }
    let cut_off = |answered: &str, later_s: u64| {
        cc(answered).may_serve_stale_when_disconnected(&NOTHING, NOW_S + later_s)
    };
    assert!(cut_off("max-age=10", 10 + 86_400) && !cut_off("max-age=10", 11 + 86_400));
    assert!(cut_off("max-age=10, stale-if-error=5", 15) && !cut_off("max-age=10, stale-if-error=5", 16));
    for strict in ["must-revalidate", "proxy-revalidate", "s-maxage=10", "no-cache"] {
        let answered = format!("max-age=10, stale-if-error=50, {strict}");
        assert!(!on_error(&answered, "", 12) && !cut_off(&answered, 12), "{strict}");
        let must_fail = |later_s: u64| cc(&answered).must_fail_when_disconnected(NOW_S + later_s);
        assert!(!must_fail(9), "{strict}");
        assert_eq!(must_fail(10), strict != "no-cache", "{strict}");
    }
    assert!(!cc("max-age=10").must_fail_when_disconnected(NOW_S + 100_000));
}

#[test]
fn an_update_from_a_304_takes_its_age() {
    let (none, merged) =
        (OwnedFields::new::<&str, &str>(&[]), OwnedFields::new(&[("Cache-Control", "max-age=60")]));
    let newer = OwnedFields::new(&[("Age", "20")]);
    let policy = Policy::validated(
        &request(Method::Get, b"/", &none),
        &response(200, &merged),
        &response(304, &newer),
        NOW_S,
        NOW_S,
    );
    assert_eq!(policy.unwrap().ttl_s(NOW_S), 40);
}

#[test]
fn own_content_is_always_fresh() {
    let policy = Policy::default();
    assert_eq!(policy.reuse(&NOTHING, u64::MAX - 1), Reuse::Fresh { age_s: 0 });
}

#[test]
fn what_was_stored_under_a_clock_ahead_of_this_one_is_stale() {
    for policy in [cc("max-age=60, stale-while-revalidate=60"), cc("max-age=2147483648")] {
        let reuse = |ahead_s| policy.reuse(&NOTHING, NOW_S - ahead_s);
        assert!(matches!(reuse(5), Reuse::Fresh { age_s: 0 }));
        for ahead_s in [6, 3600, NOW_S] {
            assert_eq!(reuse(ahead_s), Reuse::Validate(Validation::Stale), "{ahead_s}");
            assert!(policy.ttl_s(NOW_S - ahead_s) <= 0);
        }
    }
    let file = Policy::fresh_for(1, NOW_S);
    assert!(file.ttl_s(NOW_S) > 0 && file.ttl_s(NOW_S - 60) <= 0);
}

#[test]
fn other_encodings_are_refused() {
    let bytes = cc("max-age=60").to_bytes();
    for (index, value) in [(0, 0), (0, 2), (1, 0x80)] {
        let mut other = bytes;
        other[index] = value;
        assert_eq!(Policy::from_bytes(&other), None);
    }
}

fn any_policy() -> impl Strategy<Value = Policy> {
    (any::<[u64; 2]>(), any::<[u32; 4]>(), 0..=KNOWN_FLAGS).prop_map(|(times, numbers, flags)| Policy {
        response_time_s: times[0],
        date_s: times[1],
        lifetime_s: numbers[0],
        initial_age_s: numbers[1],
        stale_while_revalidate_s: numbers[2],
        stale_if_error_s: numbers[3],
        flags,
    })
}

proptest! {
    #[test]
    fn what_is_encoded_reads_back(policy in any_policy()) {
        prop_assert_eq!(Policy::from_bytes(&policy.to_bytes()), Some(policy));
    }

    #[test]
    fn no_numbers_make_it_panic(bytes in any::<[u8; Policy::ENCODED_BYTES]>(), policy in any_policy(), now_s in any::<u64>(), limit in any::<u32>()) {
        let asked = RequestDirectives { max_age_s: Some(limit), min_fresh_s: Some(limit), max_stale_s: Some(limit), ..NOTHING };
        for policy in Policy::from_bytes(&bytes).into_iter().chain([policy]) {
            for asked in [NOTHING, asked] {
                let reuse = policy.reuse(&asked, now_s);
                prop_assert_eq!(policy.may_serve_stale_on_error(&asked, now_s), policy.may_serve_stale_on_error(&asked, now_s));
                let _ = policy.may_serve_stale_when_disconnected(&asked, now_s);
                if let Reuse::Fresh { .. } = reuse {
                    prop_assert!(policy.ttl_s(now_s) > 0);
                }
            }
        }
    }

    #[test]
    fn no_fields_make_it_panic(value in prop::collection::vec(any::<u8>(), 0..40), name in 0..8_usize, status in 0..1000_u16, times in any::<[u64; 2]>()) {
        let names = ["Age", "Date", "Expires", "Last-Modified", "Cache-Control", "Vary", "Pragma", "CDN-Cache-Control"];
        let fields = OwnedFields::new(&[(names[name].as_bytes(), &value[..]), (b"ETag", b"x")]);
        let _ = Policy::new(&request(Method::Get, b"/", &fields), &response(status, &fields), times[0], times[1]);
    }
}
