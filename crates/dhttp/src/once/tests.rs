use proptest::prelude::*;

use super::*;

const CLIENT: &str = "192.0.2.1";
const ASKED: Content<'_> = Content { http: b"POST / HTTP/1.1\r\n\r\n", secret: true };

fn client() -> IpAddr {
    CLIENT.parse().unwrap()
}

fn window(config: WindowConfig) -> (ReplayWindow, Instant) {
    let now = Instant::now();
    (ReplayWindow::new(config, [7; 16], now), now)
}

fn after(now: Instant, seconds: u64) -> Instant {
    now + Duration::from_secs(seconds)
}

#[test]
fn a_ticket_that_somebody_else_has_read_tells_and_changes_nothing() {
    let (mut window, now) = window(WindowConfig::default());
    let ticket = window.issue(client(), now).unwrap();
    let one = Numbered { ticket, number: 0 };
    assert_eq!(window.admit(&one, ASKED, client(), Channel::Datagram, now), Admission::Execute);
    window.executed(&one, Some(b"secret"), now);
    let stranger: IpAddr = "198.51.100.99".parse().unwrap();
    let farthest = Numbered { ticket, number: u32::MAX };
    for number in [one, farthest] {
        assert_eq!(window.admit(&number, ASKED, stranger, Channel::Datagram, now), Admission::Running);
        assert_eq!(window.admit(&number, ASKED, stranger, Channel::Stream, now), Admission::Unknown);
    }
    let again = window.admit(&one, ASKED, client(), Channel::Stream, now);
    assert_eq!(again, Admission::Executed(Bytes::from_static(b"secret")));
    window.check_invariants();
}

#[test]
fn a_number_seen_on_the_way_brings_nobody_on_the_same_network_the_response() {
    let (mut window, now) = window(WindowConfig::default());
    let ticket = window.issue(client(), now).unwrap();
    let one = Numbered { ticket, number: 0 };
    assert_eq!(window.admit(&one, ASKED, client(), Channel::Datagram, now), Admission::Execute);
    let other = Content { http: b"POST /anything HTTP/1.1\r\n\r\n", secret: true };
    let guessed = Content { secret: false, ..ASKED };
    let asked_by_others = |window: &mut ReplayWindow| {
        for content in [other, guessed] {
            for channel in [Channel::Datagram, Channel::Stream] {
                let admission = window.admit(&one, content, client(), channel, now);
                assert_eq!(admission, Admission::Unknown, "{content:?} {channel:?}");
            }
        }
    };
    asked_by_others(&mut window);
    window.executed(&one, Some(b"secret"), now);
    asked_by_others(&mut window);
    let again = window.admit(&one, ASKED, client(), Channel::Stream, now);
    assert_eq!(again, Admission::Executed(Bytes::from_static(b"secret")));
    window.check_invariants();
}

#[test]
fn the_highest_number_of_all_makes_no_other_too_old() {
    let (mut window, now) = window(WindowConfig::default());
    let ticket = window.issue(client(), now).unwrap();
    let mut admit =
        |number| window.admit(&Numbered { ticket, number }, ASKED, client(), Channel::Datagram, now);
    assert_eq!(admit(0), Admission::Execute);
    assert_eq!(admit(u32::MAX), Admission::Execute);
    assert_eq!(admit(0), Admission::Running);
    // For as long as a ticket is good.
    for number in 1..10_000 {
        assert_eq!(admit(number), Admission::Execute, "{number}");
    }
    window.check_invariants();
}

#[test]
fn time_does_not_go_backwards_whichever_core_says_what_it_is() {
    let config = WindowConfig { tickets: 1, ..WindowConfig::default() };
    let (mut window, now) = window(config);
    let before = window.issue(client(), after(now, 8)).unwrap();
    let other: IpAddr = "198.51.100.1".parse().unwrap();
    let taken = Numbered { ticket: window.issue(other, after(now, 8)).unwrap(), number: 0 };
    assert_eq!(window.admit(&taken, ASKED, other, Channel::Datagram, after(now, 8)), Admission::Execute);
    // There is no room for the first ticket, nor for any that was issued until then.
    let one = Numbered { ticket: before, number: 0 };
    assert_eq!(window.admit(&one, ASKED, client(), Channel::Datagram, after(now, 10)), Admission::UseTcp);
    window.tickets.clear();
    window.networks.clear();
    // Another core is late.
    assert_eq!(window.issue(client(), after(now, 9)), None);
    assert!(window.issue(client(), after(now, 11)).is_some());
}

#[test]
fn a_batch_that_was_taken_before_a_ticket_was_issued_does_not_forget_it() {
    let (mut window, now) = window(WindowConfig::default());
    let ticket = window.issue(client(), after(now, 10)).unwrap();
    let one = Numbered { ticket, number: 0 };
    assert_eq!(window.admit(&one, ASKED, client(), Channel::Datagram, after(now, 10)), Admission::Execute);
    assert_eq!(window.admit(&one, ASKED, client(), Channel::Datagram, after(now, 9)), Admission::Running);
    window.check_invariants();
}

#[test]
fn a_request_is_executed_once_and_answered_as_often_as_it_is_sent() {
    let (mut window, now) = window(WindowConfig::default());
    let ticket = window.issue(client(), now).unwrap();
    let one = Numbered { ticket, number: 0 };
    let admit = |window: &mut ReplayWindow, channel| window.admit(&one, ASKED, client(), channel, now);
    assert_eq!(admit(&mut window, Channel::Datagram), Admission::Execute);
    assert_eq!(admit(&mut window, Channel::Datagram), Admission::Running);
    assert_eq!(admit(&mut window, Channel::Stream), Admission::Running);
    window.executed(&one, Some(b"done"), now);
    for channel in [Channel::Datagram, Channel::Stream] {
        assert_eq!(admit(&mut window, channel), Admission::Executed(Bytes::from_static(b"done")));
    }
    let later = after(now, 61);
    assert_eq!(window.admit(&one, ASKED, client(), Channel::Stream, later), Admission::Unknown);
    window.check_invariants();
}

#[test]
fn another_window_knows_nothing_of_a_ticket_and_executes_nothing_by_it() {
    let (mut before, now) = window(WindowConfig::default());
    let ticket = before.issue(client(), now).unwrap();
    let mut restarted = ReplayWindow::new(WindowConfig::default(), [8; 16], now);
    let one = Numbered { ticket, number: 0 };
    assert_eq!(restarted.admit(&one, ASKED, client(), Channel::Datagram, now), Admission::NewTicket);
    assert_eq!(restarted.admit(&one, ASKED, client(), Channel::Stream, now), Admission::Unknown);
}

#[test]
fn an_old_number_is_not_executed_again() {
    let (mut window, now) = window(WindowConfig::default());
    let ticket = window.issue(client(), now).unwrap();
    let admit = |window: &mut ReplayWindow, number, channel| {
        window.admit(&Numbered { ticket, number }, ASKED, client(), channel, now)
    };
    for number in (0..=WINDOW).filter(|number| *number != 1) {
        assert_eq!(admit(&mut window, number, Channel::Datagram), Admission::Execute);
    }
    assert_eq!(window.tickets.first_key_value().unwrap().1.floor, 0, "all of them are remembered");
    let late = admit(&mut window, 1, Channel::Datagram);
    assert_eq!(late, Admission::Execute, "within the window");
    assert_eq!(admit(&mut window, 0, Channel::Datagram), Admission::Running);
    assert_eq!(admit(&mut window, 0, Channel::Stream), Admission::Unknown);
    window.check_invariants();
    // One that was never seen is as unknown, if as many higher ones are remembered.
    for number in 1000..1000 + WINDOW {
        assert_eq!(admit(&mut window, number, Channel::Datagram), Admission::Execute);
    }
    assert_eq!(admit(&mut window, 999, Channel::Datagram), Admission::Running);
    assert_eq!(admit(&mut window, 999, Channel::Stream), Admission::Unknown);
    window.check_invariants();
}

#[test]
fn a_ticket_out_of_date_executes_nothing_new_but_knows_what_it_did() {
    let (mut window, now) = window(WindowConfig::default());
    let ticket = window.issue(client(), now).unwrap();
    let numbered = |number| Numbered { ticket, number };
    window.admit(&numbered(0), ASKED, client(), Channel::Datagram, after(now, 600));
    window.executed(&numbered(0), Some(b"x"), after(now, 600));
    let late = after(now, 601);
    assert_eq!(window.admit(&numbered(1), ASKED, client(), Channel::Datagram, late), Admission::NewTicket);
    assert!(matches!(
        window.admit(&numbered(0), ASKED, client(), Channel::Datagram, late),
        Admission::Executed(_)
    ));
    let gone = after(now, 661);
    assert_eq!(window.admit(&numbered(0), ASKED, client(), Channel::Stream, gone), Admission::Unknown);
    assert_eq!(window.tickets.len(), 0);
    window.check_invariants();
}

#[test]
fn what_a_full_window_sends_to_a_connection_is_never_taken_by_datagram_afterwards() {
    let (mut window, now) = window(WindowConfig { tickets: 2, ..WindowConfig::default() });
    let others: Vec<IpAddr> = (2..5).map(|n| IpAddr::from([192, 0, 2, n])).collect();
    let tickets: Vec<_> = others.iter().map(|other| window.issue(*other, now).unwrap()).collect();
    let one = |n: usize| Numbered { ticket: tickets[n], number: 0 };
    let soon = after(now, 100);
    for n in [0, 1] {
        assert_eq!(window.admit(&one(n), ASKED, others[n], Channel::Datagram, soon), Admission::Execute);
    }
    assert_eq!(window.admit(&one(2), ASKED, others[2], Channel::Datagram, soon), Admission::UseTcp);
    assert_eq!(window.admit(&one(2), ASKED, others[2], Channel::Stream, soon), Admission::Execute);
    assert_eq!(window.issue(others[2], soon), None, "there is no room: no ticket is issued in vain");
    // The other tickets go; a copy that comes very late is still not executed.
    window.tickets.clear();
    window.networks.clear();
    assert_eq!(window.admit(&one(2), ASKED, others[2], Channel::Datagram, soon), Admission::UseTcp);
    let next = window.issue(others[2], after(soon, 1)).unwrap();
    let next = Numbered { ticket: next, number: 0 };
    assert_eq!(window.admit(&next, ASKED, others[2], Channel::Datagram, after(soon, 1)), Admission::Execute);
}

#[test]
fn without_room_for_responses_requests_go_to_connections_and_are_executed_there_once() {
    let config = WindowConfig { kept_bytes: 8 * 400, ..WindowConfig::default() };
    let (mut window, now) = window(config);
    let ticket = window.issue(client(), now).unwrap();
    let numbered = |number| Numbered { ticket, number };
    assert_eq!(window.admit(&numbered(0), ASKED, client(), Channel::Datagram, now), Admission::Execute);
    window.executed(&numbered(0), Some(&[0; 300]), now);
    for _ in 0..2 {
        assert_eq!(window.admit(&numbered(1), ASKED, client(), Channel::Datagram, now), Admission::UseTcp);
    }
    assert_eq!(window.admit(&numbered(1), ASKED, client(), Channel::Stream, now), Admission::Execute);
    assert_eq!(window.admit(&numbered(1), ASKED, client(), Channel::Datagram, now), Admission::Running);
    let other = IpAddr::from([198, 51, 100, 1]);
    let theirs = Numbered { ticket: window.issue(other, now).unwrap(), number: 0 };
    assert_eq!(
        window.admit(&theirs, ASKED, other, Channel::Datagram, now),
        Admission::Execute,
        "their own share"
    );
    window.check_invariants();
}

#[test]
fn many_networks_that_take_all_they_can_leave_some_tickets() {
    let (mut window, now) = window(WindowConfig { tickets: 800, ..WindowConfig::default() });
    for network in 1..=16 {
        let greedy = IpAddr::from([198, 51, 100, network]);
        let mut taken = 0;
        while let Some(ticket) = window.issue(greedy, now) {
            let numbered = Numbered { ticket, number: 0 };
            let admission = window.admit(&numbered, ASKED, greedy, Channel::Datagram, now);
            assert_eq!(admission, Admission::Execute);
            taken += 1;
        }
        assert!(taken <= 100, "{taken} of 800");
    }
    assert!(window.issue(client(), now).is_some());
    window.check_invariants();
}

#[test]
fn one_network_takes_an_eighth_of_the_tickets() {
    let (mut window, now) = window(WindowConfig { tickets: 16, ..WindowConfig::default() });
    let tickets: Vec<_> = (0..3).map(|_| window.issue(client(), now).unwrap()).collect();
    let mut admit =
        |ticket| window.admit(&Numbered { ticket, number: 0 }, ASKED, client(), Channel::Datagram, now);
    let admitted: Vec<_> = tickets.into_iter().map(&mut admit).collect();
    assert_eq!(admitted, [Admission::Execute, Admission::Execute, Admission::UseTcp]);
    assert!(window.issue(IpAddr::from([198, 51, 100, 1]), now).is_some());
    window.check_invariants();
}

proptest! {
    /// Copies of requests come in any order, on any channel, at any time: none is executed twice.
    #[test]
    fn nothing_is_executed_twice(
        steps in prop::collection::vec((0..4_usize, 0..200_u32, any::<bool>(), 0..120_u64, any::<bool>()), 1..300),
    ) {
        let config = WindowConfig { tickets: 2, kept_bytes: 4000, ..WindowConfig::default() };
        let (mut window, mut now) = window(config);
        let addresses: Vec<IpAddr> = (0..4).map(|n| IpAddr::from([192, 0, 2, n])).collect();
        let tickets: Vec<_> = addresses.iter().map(|a| window.issue(*a, now).unwrap()).collect();
        let mut executed = std::collections::HashSet::new();
        let mut streamed = std::collections::HashSet::new();
        for (who, number, stream, wait, keeps) in steps {
            now = after(now, wait / 30);
            // A client sends a request on a connection once at most.
            if stream && !streamed.insert((who, number)) {
                continue;
            }
            let numbered = Numbered { ticket: tickets[who], number };
            let channel = if stream { Channel::Stream } else { Channel::Datagram };
            if window.admit(&numbered, ASKED, addresses[who], channel, now) == Admission::Execute {
                prop_assert!(executed.insert((who, number)), "{who} {number}");
                window.executed(&numbered, keeps.then_some(&b"response"[..]), now);
            }
            window.check_invariants();
        }
    }

    #[test]
    fn any_bytes_are_refused_as_a_ticket(ticket: [u8; TICKET_BYTES], number: u32) {
        let (mut window, now) = window(WindowConfig::default());
        let admission = window.admit(&Numbered { ticket, number }, ASKED, client(), Channel::Datagram, now);
        prop_assert_eq!(admission, Admission::NewTicket);
    }
}
