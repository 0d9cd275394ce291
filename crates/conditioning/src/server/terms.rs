//! On which terms a server keeps connections for their clients' next requests: it takes those that the filters would
//! hand on as they are and at once, and leaves the others to them.

use std::cell::RefCell;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::time::Duration;

use tidegate_http::normalize::Personality;

use crate::arguments::{Argument, Arguments};
use crate::filters::normalize::{Form, Normalize};
use crate::keeper::whole::Whole;
use crate::link;
use crate::neighbours::{FilterError, monotonic_ns};

const TIME: Argument = Argument { key: "time", default: "0ms", help: "" };
const NORMAL: Argument = Argument { key: "normal", default: "", help: "" };
const ORDER: Argument = Argument { key: "order", default: "no", help: "" };

/// Where there is an order, a client's next request is taken out of turn only while no other has waited for longer:
/// what a server does with those that it has takes about so long if it is quick, and one that is slow serves each in
/// its turn.
const PATIENCE: Duration = Duration::from_millis(5);

/// Such terms. Their text is what the launcher tells the server's processes.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Terms {
    /// How long a connection is kept.
    pub time: Duration,
    /// Requests are to be normal to these: others are rewritten or refused by `normalize`.
    pub normal_to: Vec<Personality>,
    /// `prior` says who is next.
    pub in_order: bool,
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.normal_to.iter().map(|personality| personality.name()).collect();
        let order = if self.in_order { "yes" } else { "no" };
        write!(f, "time={}ms,normal={},order={order}", self.time.as_millis(), names.join("+"))
    }
}

impl FromStr for Terms {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Self, FilterError> {
        let arguments = Arguments::parse(text, &[TIME, NORMAL, ORDER])?;
        let names = arguments.text("normal").split('+').filter(|name| !name.is_empty());
        let unknown = |_| arguments.wrong("normal", "names of servers with + between them");
        Ok(Self {
            time: arguments.duration("time")?,
            normal_to: names.map(|name| name.parse().map_err(unknown)).collect::<Result<_, _>>()?,
            in_order: arguments.flag("order")?,
        })
    }
}

thread_local! {
    static NORMALIZERS: RefCell<Vec<Normalize>> = const { RefCell::new(Vec::new()) };
}

impl Terms {
    /// Whether a server may take a request, which is whole and stands at the start of `bytes`, from a connection that
    /// it has kept, while others wait in `link`. Content is another matter: see [`super::head::ask_for_the_end`].
    pub(super) fn allow(&self, whole: &Whole, bytes: &[u8], link: BorrowedFd<'_>) -> bool {
        let has_content = whole.socket_bytes != u64::from(whole.head_bytes);
        !has_content && self.is_normal(bytes) && !(self.in_order && waits_long(link))
    }

    fn is_normal(&self, head: &[u8]) -> bool {
        let is_normal = |normalizers: &RefCell<Vec<Normalize>>| {
            // Another thread's signal handler, which reads; or this one's.
            let Ok(mut normalizers) = normalizers.try_borrow_mut() else { return false };
            if normalizers.len() < self.normal_to.len() {
                *normalizers = self.normal_to.iter().copied().map(Normalize::new).collect();
            }
            normalizers.iter_mut().all(|normalize| matches!(normalize.normal_head(head), Ok(Form::Normal)))
        };
        self.normal_to.is_empty() || NORMALIZERS.try_with(is_normal).unwrap_or(false)
    }
}

fn waits_long(link: BorrowedFd<'_>) -> bool {
    let patience = PATIENCE.as_nanos() as u64;
    link::arrived_ns(link).is_some_and(|arrived| monotonic_ns().saturating_sub(arrived) > patience)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::keeper::whole::{Progression, Reader};
    use crate::wire::{Bundle, Id};

    const PATIENT: Terms = Terms { time: Duration::from_secs(1), normal_to: Vec::new(), in_order: true };

    fn allows(terms: &Terms, request: &str, link: BorrowedFd<'_>) -> bool {
        let Progression::Whole(whole) = Reader::new(1000).judge(request.as_bytes()).unwrap() else {
            panic!()
        };
        terms.allow(&whole, request.as_bytes(), link)
    }

    #[test]
    fn terms_are_read_as_they_are_written() {
        let normal_to = Personality::ALL.to_vec();
        for terms in [Terms::default(), PATIENT, Terms { normal_to, ..PATIENT }] {
            assert_eq!(terms.to_string().parse::<Terms>().unwrap(), terms, "{terms}");
        }
        for wrong in ["1000", "time=1", "time=1s,normal=other", "time=1s,order=2", "time=1s,police=yes"] {
            assert!(wrong.parse::<Terms>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_filters_would_rewrite_or_refuse_is_left_to_them_and_so_is_content() {
        let (ours, _theirs) = link::pair().unwrap();
        let all = Terms { normal_to: vec![Personality::Strict, Personality::Apache], ..Terms::default() };
        let none = Terms::default();
        let request = |line: &str, fields: &str| format!("{line} HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        for (line, fields, is_normal) in [
            ("GET /a/b?c=//d", "", true),
            ("HEAD /", "X: y\r\n", true),
            ("GET //a", "", false),
            ("GET /a/../b", "", false),
            ("GET /%7ea", "", false),
            ("GET /%00", "", false),
            ("GET http://a/", "", false),
            ("CONNECT a", "", false),
        ] {
            let text = request(line, fields);
            assert_eq!(allows(&all, &text, ours.as_fd()), is_normal, "{line}");
            assert!(allows(&none, &text, ours.as_fd()), "{line}");
        }
        for fields in ["Content-Length: 1\r\n\r\nx", "Transfer-Encoding: chunked\r\n\r\n0\r\n"] {
            assert!(!allows(&none, &request("POST /a", fields), ours.as_fd()), "{fields}");
        }
    }

    #[test]
    fn nobody_is_served_out_of_turn_while_another_has_waited_for_long() {
        let (ours, theirs) = link::pair().unwrap();
        let get = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
        let request = get.as_bytes().to_vec();
        let (socket_bytes, head_bytes) = (request.len() as u64, request.len() as u32);
        let peer = ([192, 0, 2, 1], 1).into();
        let mut bundle = Bundle {
            id: Id { slot: 1, generation: 1 },
            flags: 0,
            peer,
            socket_bytes,
            arrived_ns: monotonic_ns() + 60_000_000_000,
            replaces: 0,
            head_bytes,
            request,
        };
        assert!(allows(&PATIENT, get, ours.as_fd()), "nobody waits");
        link::send_bundle(theirs.as_fd(), &bundle, theirs.as_fd(), &mut Vec::new()).unwrap();
        assert!(allows(&PATIENT, get, ours.as_fd()), "it has just come");
        assert!(matches!(link::receive(ours.as_fd(), true, true), Ok(link::Received::Request(_))));
        bundle.arrived_ns = monotonic_ns() - PATIENCE.as_nanos() as u64 - 1;
        link::send_bundle(theirs.as_fd(), &bundle, theirs.as_fd(), &mut Vec::new()).unwrap();
        for _ in 0..2 {
            assert!(!allows(&PATIENT, get, ours.as_fd()), "it waits, and goes on waiting");
        }
        assert!(allows(&Terms { in_order: false, ..PATIENT }, get, ours.as_fd()), "there is no order");
    }
}
