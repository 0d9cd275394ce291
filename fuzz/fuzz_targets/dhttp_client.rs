//! Any answers, from anybody, leave the client's tables sound, and each request gets one answer at most.
#![no_main]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use tidegate_dhttp::client::{Client, ClientConfig, Event, NewRequest};
use tidegate_dhttp::wire::RequestId;
use tidegate_http::Method;

fuzz_target!(|data: &[u8]| {
    let config = ClientConfig { outstanding: 4, tokens: 2, ..ClientConfig::default() };
    let mut client = Client::new(config, [7; 32]);
    let mut now = Instant::now();
    let mut generation = client.use_ports(40_000, now);
    let mut ids: Vec<RequestId> = Vec::new();
    let mut answered: HashMap<RequestId, u32> = HashMap::new();
    let mut rest = data;
    while let Some((&step, after)) = rest.split_first() {
        let length = usize::from(after.first().copied().unwrap_or(0)).min(after.len());
        let (argument, after) = after.split_at(length);
        rest = after;
        match step & 7 {
            0 => {
                let request = NewRequest {
                    server: ([192, 0, 2, 1], 80).into(),
                    site: "a".into(),
                    method: if step & 8 == 0 { Method::Get } else { Method::Post },
                    http: (&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..]).into(),
                    by_tcp: step & 16 != 0,
                };
                ids.extend(client.start(request, now));
            }
            1..=3 => {
                let from = if step & 8 == 0 { [192, 0, 2, 1] } else { [198, 51, 100, 1] };
                let id = ids.last().copied().filter(|_| step & 16 == 0);
                let datagram = id.map_or_else(|| argument.to_vec(), |id| [&id.0[..], argument].concat());
                client.handle_datagram(generation, (from, 80).into(), &datagram, now);
            }
            4 => {
                if let Some(id) = ids.last() {
                    let claimed = client.claim(generation, [192, 0, 2, 1].into(), *id).is_ok();
                    if claimed && step & 8 == 0 {
                        client.on_claim_broken(*id);
                    } else if claimed {
                        *answered.entry(*id).or_default() += 1;
                    }
                }
            }
            5 => {
                now += Duration::from_millis(u64::from(step) * 100);
                client.handle_timeout(now);
            }
            6 => {
                if let Some(id) = ids.pop() {
                    client.finish(id);
                }
            }
            _ if step & 8 == 0 => client.handle_unreachable(([192, 0, 2, 1], 80).into(), now),
            _ => generation = client.use_ports(40_001 + u16::from(step), now),
        }
        while client.poll_transmit().is_some() {}
        while let Some(event) = client.poll_event() {
            let (Event::Response { id, .. }
            | Event::UseTcp { id, .. }
            | Event::OutcomeUnknown { id }
            | Event::UseHttp { id }) = event;
            let times = answered.entry(id).or_default();
            *times += 1;
            assert_eq!(*times, 1, "{id:?} was answered again");
        }
        client.check_invariants();
    }
});
