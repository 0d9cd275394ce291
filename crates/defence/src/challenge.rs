//! Challenges: what a browser does by itself and most programs do not.
//!
//! A task is `ADDRESS-bound expiry + MAC`; nothing is kept about it. Without work, the client shows that it follows a
//! redirect and returns a cookie. With work, a page of ours lets the browser search for a number whose SHA-256 with the
//! task has so many leading zero bits. The page needs no other host, and no secure context.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use tidegate_core::hooks::hash;

/// The cookie that carries a task and its solution.
pub const COOKIE: &str = tidegate_core::hooks::PASS_COOKIE;

/// Places for addresses that have shown a solution; two that share one are taken for each other.
const PLACES: usize = 1 << 16;
/// Bytes of the MAC that a task has.
const TAG_BYTES: usize = 16;
/// For how long it is remembered that somebody behind an address has shown one.
const SHOWN_S: u32 = 600;

/// From which addresses solutions came lately. Of fixed size; a meeting of two only spares somebody a block.
#[derive(Debug)]
pub(crate) struct Passes {
    /// The second after the one in which the last came; 0: never.
    shown_s: Box<[AtomicU32]>,
    seed: u64,
}

impl Passes {
    /// The memory of one.
    pub(crate) const BYTES: usize = PLACES * size_of::<AtomicU32>();

    pub(crate) fn new(seed: u64) -> Self {
        Self { shown_s: (0..PLACES).map(|_| AtomicU32::new(0)).collect(), seed }
    }

    fn place(&self, client: IpAddr) -> &AtomicU32 {
        &self.shown_s[hash(self.seed, &identity(client)) as usize % PLACES]
    }

    /// Somebody behind this address has shown a solution.
    pub(crate) fn shown(&self, client: IpAddr, now_ms: u64) {
        self.place(client).store((now_ms / 1000) as u32 + 1, Ordering::Relaxed);
    }

    /// Whether somebody has lately.
    pub(crate) fn was_shown(&self, client: IpAddr, now_ms: u64) -> bool {
        let shown_s = self.place(client).load(Ordering::Relaxed);
        shown_s > 0 && ((now_ms / 1000) as u32).saturating_sub(shown_s) < SHOWN_S
    }
}

/// Makes tasks and knows solutions.
#[derive(Clone)]
pub struct Challenger {
    key: [u8; 32],
    bits: u8,
    pass_ms: u64,
}

impl std::fmt::Debug for Challenger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Challenger").field("bits", &self.bits).finish_non_exhaustive()
    }
}

impl Challenger {
    /// `bits` leading zeros are asked for; with 0, to return the cookie is enough. A pass is good for `pass_ms`.
    pub fn new(key: [u8; 32], bits: u8, pass_ms: u64) -> Self {
        Self { key, bits, pass_ms }
    }

    /// Whether work is asked for.
    pub fn asks_for_work(&self) -> bool {
        self.bits > 0
    }

    /// A task for this client: its end in milliseconds and a signature, as hexadecimal digits.
    pub fn task(&self, client: IpAddr, now_ms: u64) -> String {
        self.signed(client, now_ms.saturating_add(self.pass_ms))
    }

    fn signed(&self, client: IpAddr, until_ms: u64) -> String {
        let Some(mac) = self.mac(client, until_ms) else { return String::new() };
        let tag = mac.finalize().into_bytes();
        let hex = tag.iter().take(TAG_BYTES).fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
        format!("{until_ms:016x}{hex}")
    }

    fn mac(&self, client: IpAddr, until_ms: u64) -> Option<Hmac<Sha256>> {
        // An HMAC takes keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).ok()?;
        mac.update(&identity(client));
        mac.update(&until_ms.to_be_bytes());
        Some(mac)
    }

    /// Whether a `Cookie` field holds a task of ours for this client, not yet over, and its solution.
    pub fn is_solved(&self, cookie: &[u8], client: IpAddr, now_ms: u64) -> bool {
        let mut pairs = cookie.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
        pairs.any(|pair| {
            pair.strip_prefix(COOKIE.as_bytes())
                .and_then(|rest| rest.strip_prefix(b"="))
                .and_then(|value| std::str::from_utf8(value).ok())
                .is_some_and(|value| self.is_solution(value, client, now_ms))
        })
    }

    fn is_solution(&self, value: &str, client: IpAddr, now_ms: u64) -> bool {
        let (task, number) = value.split_once('.').unwrap_or((value, ""));
        let Some((until_ms, tag)) = parts(task) else { return false };
        // Compared in a time that says nothing of how far a forged tag is right.
        let is_ours =
            || self.mac(client, until_ms).is_some_and(|mac| mac.verify_truncated_left(&tag).is_ok());
        until_ms > now_ms
            && number.len() <= 20
            && is_ours()
            && leading_zero_bits(&Sha256::digest(value.as_bytes())) >= u32::from(self.bits)
    }

    /// The page that has a browser do the work.
    pub fn page(&self, task: &str) -> Vec<u8> {
        let max_age_s = self.pass_ms / 1000;
        include_str!("challenge.html")
            .replace("{{task}}", task)
            .replace("{{bits}}", &self.bits.to_string())
            .replace("{{cookie}}", COOKIE)
            .replace("{{max_age}}", &max_age_s.to_string())
            .into_bytes()
    }

    /// The field that gives the client a cookie to return.
    pub fn set_cookie(&self, task: &str) -> String {
        format!(
            "Set-Cookie: {COOKIE}={task}; Path=/; Max-Age={}; HttpOnly; SameSite=Lax\r\n",
            self.pass_ms / 1000
        )
    }
}

/// What a task is bound to: the address, of which an IPv6 host may change the lower half at will.
/// The time and the tag of a task.
fn parts(task: &str) -> Option<(u64, [u8; TAG_BYTES])> {
    let (until_ms, tag) = task.split_at_checked(16).filter(|(_, tag)| tag.len() == 2 * TAG_BYTES)?;
    let tag = u128::from_str_radix(tag, 16).ok()?.to_be_bytes();
    Some((u64::from_str_radix(until_ms, 16).ok()?, tag))
}

fn identity(client: IpAddr) -> [u8; 8] {
    let mut bytes = [0; 8];
    match client.to_canonical() {
        IpAddr::V4(v4) => bytes[..4].copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => bytes.copy_from_slice(&v6.octets()[..8]),
    }
    bytes
}

fn leading_zero_bits(digest: &[u8]) -> u32 {
    let zeros = digest.iter().take_while(|byte| **byte == 0).count();
    zeros as u32 * 8 + digest.get(zeros).map_or(0, |byte| byte.leading_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn solve(task: &str, bits: u32) -> String {
        (0u64..)
            .map(|number| format!("{task}.{number}"))
            .find(|value| leading_zero_bits(&Sha256::digest(value.as_bytes())) >= bits)
            .unwrap()
    }

    #[test]
    fn solution_passes_its_own_client_until_it_is_over() {
        let challenger = Challenger::new([7; 32], 12, 1_000);
        let task = challenger.task(client("10.0.0.1"), 0);
        let cookie = format!("a=b; {COOKIE}={}; c=d", solve(&task, 12));
        assert!(challenger.is_solved(cookie.as_bytes(), client("10.0.0.1"), 999));
        assert!(!challenger.is_solved(cookie.as_bytes(), client("10.0.0.1"), 1_000), "over");
        assert!(!challenger.is_solved(cookie.as_bytes(), client("10.0.0.2"), 0), "another client's");
        let unsolved = (0u64..).map(|n| format!("{COOKIE}={task}.{n}"));
        let wrong = unsolved.into_iter().find(|text| !solves(text, 12)).unwrap();
        assert!(!challenger.is_solved(wrong.as_bytes(), client("10.0.0.1"), 0), "no work done");
        let other = Challenger::new([8; 32], 12, 1_000);
        assert!(!other.is_solved(cookie.as_bytes(), client("10.0.0.1"), 0), "another server's");
    }

    fn solves(cookie: &str, bits: u32) -> bool {
        let value = cookie.split_once('=').unwrap().1;
        leading_zero_bits(&Sha256::digest(value.as_bytes())) >= bits
    }

    #[test]
    fn without_work_the_cookie_itself_is_the_solution() {
        let challenger = Challenger::new([7; 32], 0, 1_000);
        let address = client("2001:db8::1");
        let cookie = format!("{COOKIE}={}", challenger.task(address, 5));
        assert!(
            challenger.is_solved(cookie.as_bytes(), client("2001:db8::ffff"), 6),
            "the same network of 64 bits"
        );
        assert!(!challenger.is_solved(cookie.as_bytes(), client("2001:db8:0:1::1"), 6));
    }

    #[test]
    fn whatever_else_a_cookie_holds_is_no_solution() {
        let challenger = Challenger::new([7; 32], 8, 1_000);
        for cookie in [
            "",
            "tidegate_pass",
            "tidegate_pass=",
            "tidegate_pass=ffffffffffffffff",
            "tidegate_pass=é.1",
            "=;=;",
        ] {
            assert!(!challenger.is_solved(cookie.as_bytes(), client("10.0.0.1"), 0), "{cookie}");
        }
        assert!(!challenger.is_solved(b"tidegate_pass=\xff\xff", client("10.0.0.1"), 0));
    }

    #[test]
    fn page_names_its_task_and_fetches_nothing() {
        let challenger = Challenger::new([7; 32], 16, 1_000);
        let page = String::from_utf8(challenger.page("00ff")).unwrap();
        assert!(page.contains("\"00ff\"") && !page.contains("{{"), "{page}");
        assert!(!page.contains("src=") && !page.contains("http"), "{page}");
    }
}
