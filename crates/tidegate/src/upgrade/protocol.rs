//! What a process and the one that takes its place say to each other, and in which order.
//!
//! ```text
//! new process                                   old process
//! here: it is a tidegate                   ──►
//!                                          ◄──  part …, offer: the sockets that listen
//! prepared: its configuration is good      ──►
//!                                          ◄──  yours: cache, blocks, secrets; from now on the old one stores nothing
//! serving: it accepts, and stores nothing  ──►
//!                                          ◄──  go: there is no way back; kernel programs are let go
//! succeeded: it stores                     ──►
//!                                          ◄──  farewell: the service manager knows; then what is invalidated
//!                                               the end of the old process: all of the arena is the new one's
//! ```
//!
//! Before it has succeeded the new process may fail, with a reason or by ending; the old one then goes on as before.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// The version of all this. A process that speaks another one fails, and is started by a restart instead.
pub(super) const VERSION: u32 = 1;

/// What the new process says.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(super) enum Said {
    Here {
        protocol: u32,
        version: String,
    },
    Prepared,
    Serving,
    Succeeded,
    /// It gives up.
    Failed {
        why: String,
    },
}

/// What the old process says.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(super) enum Told {
    /// Some sockets of one listener come with this.
    Part {
        address: SocketAddr,
        of: Sockets,
    },
    /// All parts have come.
    Offer,
    /// With this come the file of blocks and, if there is a cache, its arena, its bits, and its lock if it has one.
    Yours {
        has_cache: bool,
        secrets: Secrets,
    },
    /// With this comes the file of blocks as it is now.
    Go,
    Farewell,
    /// What is stored under this URL's key, in hexadecimal digits, is outdated, or everything that is stored; or only
    /// what is on its way.
    Outdated {
        key: Option<String>,
        everything: bool,
    },
}

/// What the sockets of a listener are.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Sockets {
    /// Of HTTP, one for each data core.
    Cores,
    /// Of HTTP, one for each priority class.
    Classes,
    /// Of DHTTP, for each data core one of UDP and one of TCP.
    Dhttp,
    /// Of HTTP/3, one of UDP for each data core.
    Http3,
    /// Of Trickles over UDP.
    Trickles,
    /// The admin server's.
    Admin,
}

/// What clients' proofs are made with, in hexadecimal digits.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default)]
pub(super) struct Secrets {
    pub dhttp_tokens: String,
    pub quic_tokens: String,
    pub challenges: String,
    /// Keys of Trickles listeners that have no file of keys.
    pub trickles: Vec<(SocketAddr, String)>,
}

/// How far the new process is.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Stage {
    Started,
    Here,
    Prepared,
    Serving,
    Succeeded,
}

/// The new process does not do what it should.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum Broken {
    #[error("{0}")]
    Failed(String),
    #[error("it speaks version {0} of the protocol, and this process version {VERSION}")]
    Version(u32),
    #[error("it says what it should not")]
    OutOfOrder,
}

impl Stage {
    /// What follows when the new process says this.
    pub(super) fn next(self, said: &Said) -> Result<Self, Broken> {
        match (self, said) {
            (stage, Said::Failed { why }) if stage < Self::Succeeded => Err(Broken::Failed(one_line(why))),
            (Self::Started, Said::Here { protocol: VERSION, .. }) => Ok(Self::Here),
            (Self::Started, Said::Here { protocol, .. }) => Err(Broken::Version(*protocol)),
            (Self::Here, Said::Prepared) => Ok(Self::Prepared),
            (Self::Prepared, Said::Serving) => Ok(Self::Serving),
            (Self::Serving, Said::Succeeded) => Ok(Self::Succeeded),
            _ => Err(Broken::OutOfOrder),
        }
    }
}

/// A reason of many lines is for the log of the process that has it.
fn one_line(why: &str) -> String {
    const MOST: usize = 600;
    let text: String = why.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MOST).collect();
    text.trim().strip_prefix("error: ").unwrap_or(text.trim()).to_owned()
}

pub(super) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `None`: these are not hexadecimal digits in pairs.
pub(super) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let value = |digit: u8| char::from(digit).to_digit(16).map(|value| value as u8);
    let pairs = digits.chunks(2).map(|pair| match pair {
        [high, low] => Some(value(*high)? << 4 | value(*low)?),
        _ => None,
    });
    pairs.collect()
}

/// An array of these bytes, if they are as many.
pub(super) fn array_from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    from_hex(text)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> Said {
        Said::Here { protocol: VERSION, version: "1.0.0".into() }
    }

    #[test]
    fn new_process_says_one_thing_after_the_other_and_nothing_else() {
        let order = [here(), Said::Prepared, Said::Serving, Said::Succeeded];
        let mut stage = Stage::Started;
        for (at, said) in order.iter().enumerate() {
            for other in order.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, said)| said) {
                assert_eq!(stage.next(other), Err(Broken::OutOfOrder), "{other:?} at {stage:?}");
            }
            let failed = Said::Failed { why: "error: a\nb".into() };
            assert_eq!(stage.next(&failed), Err(Broken::Failed("a b".into())));
            stage = stage.next(said).unwrap();
        }
        assert_eq!(stage, Stage::Succeeded);
        assert_eq!(stage.next(&Said::Failed { why: String::new() }), Err(Broken::OutOfOrder));
        let other = Said::Here { protocol: VERSION + 1, version: String::new() };
        assert_eq!(Stage::Started.next(&other), Err(Broken::Version(VERSION + 1)));
    }

    #[test]
    fn message_is_the_same_after_it_was_written_and_read() {
        let address = "[::1]:80".parse().unwrap();
        let secrets = Secrets { trickles: vec![(address, to_hex(&[0, 255]))], ..Secrets::default() };
        for told in [
            Told::Part { address, of: Sockets::Classes },
            Told::Yours { has_cache: true, secrets },
            Told::Outdated { key: Some(to_hex(b"http://example.org/")), everything: false },
            Told::Go,
        ] {
            let text = serde_json::to_string(&told).unwrap();
            assert_eq!(serde_json::from_str::<Told>(&text).unwrap(), told);
        }
        assert_eq!(from_hex(&to_hex(&[1, 2, 254])), Some(vec![1, 2, 254]));
        assert!(from_hex("0").is_none() && from_hex("0g").is_none());
        assert_eq!(array_from_hex::<2>("000102"), None);
    }
}
