//! Address tokens, as QUIC's (RFC 9000 §8.1): a client that presents one has received a datagram at its address and
//! port not long ago, so that a server neither reflects bytes nor opens connections to an address that was forged.
//!
//! ```text
//! token  time of issue (4, Unix seconds, wrapping)  MAC (16)
//! ```
//!
//! The MAC is SipHash-2-4 with 128 bits of output over address, port and time. Its key is derived from one secret and
//! the number of the epoch that the time of issue lies in: cores and servers that share the secret accept each other's
//! tokens, and a token that was issued at the end of an epoch stays good beyond it, without any state to rotate.

use std::hash::Hasher;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use siphasher::sip128::{Hasher128, SipHasher24};

/// Length of a token in bytes.
pub const TOKEN_BYTES: usize = 20;

const _: () = assert!(TOKEN_BYTES <= crate::wire::MAX_TOKEN_BYTES);

/// Tokens from the future are refused, but clocks of servers that share a secret differ a little.
const CLOCK_SKEW_S: u64 = 5;

/// Issues and checks tokens. Times are seconds since the Unix epoch.
#[derive(Clone)]
pub struct TokenKeys {
    secret: [u8; 16],
    lifetime_s: u64,
    /// The keys of this epoch and the one before it: what nearly every token needs.
    recent: [(u64, [u8; 16]); 2],
}

impl std::fmt::Debug for TokenKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenKeys").field("lifetime_s", &self.lifetime_s).finish_non_exhaustive()
    }
}

/// How much of a good token's life is over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TokenAge {
    /// Less than half.
    New,
    /// More than half: its owner should be given another.
    Old,
}

/// Why a token proves nothing.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum TokenError {
    /// Not of a token's length.
    #[error("malformed token")]
    Malformed,
    /// Issued too long ago, or in the future.
    #[error("token is out of date")]
    Expired,
    /// Not issued by us to this address and port.
    #[error("token does not belong to this address")]
    Forged,
}

impl TokenKeys {
    /// Keys derived from `secret`. A token is good for `lifetime`, which is at least a second and at most a day.
    pub fn new(secret: [u8; 16], lifetime: Duration) -> Self {
        let lifetime_s = lifetime.as_secs().clamp(1, 86_400);
        let recent = [0, 1].map(|epoch| (epoch, derive(&secret, epoch)));
        Self { secret, lifetime_s, recent }
    }

    /// A token for a client that sent from `client`.
    pub fn issue(&mut self, client: SocketAddr, now_s: u64) -> [u8; TOKEN_BYTES] {
        let mut token = [0; TOKEN_BYTES];
        token[..4].copy_from_slice(&(now_s as u32).to_be_bytes());
        let mac = self.mac(client, now_s);
        token[4..].copy_from_slice(&mac.to_be_bytes());
        token
    }

    /// That `token` was issued to `client` not longer ago than the lifetime; whether more than half of that is over.
    ///
    /// # Errors
    /// It was not.
    pub fn check(&mut self, token: &[u8], client: SocketAddr, now_s: u64) -> Result<TokenAge, TokenError> {
        let token: &[u8; TOKEN_BYTES] = token.try_into().map_err(|_| TokenError::Malformed)?;
        let [t0, t1, t2, t3, mac @ ..] = *token;
        // The time of issue is the last instant with these low 32 bits, allowing for skew.
        let latest_s = now_s + CLOCK_SKEW_S;
        let age_s = u64::from((latest_s as u32).wrapping_sub(u32::from_be_bytes([t0, t1, t2, t3])));
        if age_s > self.lifetime_s + CLOCK_SKEW_S || age_s > latest_s {
            return Err(TokenError::Expired);
        }
        // One comparison of 128 bits: its time does not tell how many bytes were right.
        let expected = self.mac(client, latest_s - age_s);
        if expected ^ u128::from_be_bytes(mac) != 0 {
            return Err(TokenError::Forged);
        }
        Ok(if age_s > self.lifetime_s / 2 + CLOCK_SKEW_S { TokenAge::Old } else { TokenAge::New })
    }

    fn mac(&mut self, client: SocketAddr, issued_s: u64) -> u128 {
        let key = self.key(issued_s / self.epoch_s());
        let mut hasher = SipHasher24::new_with_key(&key);
        match client.ip().to_canonical() {
            IpAddr::V4(address) => hasher.write(&address.octets()),
            IpAddr::V6(address) => hasher.write(&address.octets()),
        }
        hasher.write(&client.port().to_be_bytes());
        hasher.write(&issued_s.to_be_bytes());
        hasher.finish128().into()
    }

    /// An epoch outlives the tokens issued in it, so that two keys are in use at any time.
    fn epoch_s(&self) -> u64 {
        self.lifetime_s + CLOCK_SKEW_S
    }

    fn key(&mut self, epoch: u64) -> [u8; 16] {
        let slot = &mut self.recent[(epoch % 2) as usize];
        if slot.0 != epoch {
            *slot = (epoch, derive(&self.secret, epoch));
        }
        slot.1
    }
}

fn derive(secret: &[u8; 16], epoch: u64) -> [u8; 16] {
    let mut hasher = SipHasher24::new_with_key(secret);
    hasher.write(b"tidegate dhttp address token key");
    hasher.write(&epoch.to_be_bytes());
    hasher.finish128().as_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CLIENT: &str = "192.0.2.1:40000";
    const LIFETIME: Duration = Duration::from_secs(600);

    fn keys() -> TokenKeys {
        TokenKeys::new([7; 16], LIFETIME)
    }

    #[test]
    fn a_token_is_old_when_half_its_life_is_over() {
        let client = CLIENT.parse().unwrap();
        let token = keys().issue(client, 1_000_000);
        assert_eq!(keys().check(&token, client, 1_000_300), Ok(TokenAge::New));
        assert_eq!(keys().check(&token, client, 1_000_301), Ok(TokenAge::Old));
    }

    #[test]
    fn a_token_is_good_for_its_lifetime_and_no_longer() {
        let client = CLIENT.parse().unwrap();
        let mut keys = keys();
        let token = keys.issue(client, 1_000_000);
        for age in [0, 1, 599, 600] {
            assert!(keys.check(&token, client, 1_000_000 + age).is_ok(), "age {age}");
        }
        assert_eq!(keys.check(&token, client, 1_000_601), Err(TokenError::Expired));
        assert!(keys.check(&token, client, 999_995).is_ok(), "clocks differ a little");
        assert_eq!(keys.check(&token, client, 999_994), Err(TokenError::Expired));
    }

    #[test]
    fn a_token_of_the_last_epoch_is_good_in_the_next_one() {
        let client = CLIENT.parse().unwrap();
        let mut keys = keys();
        let end_of_epoch = 605 * 1000 - 1;
        let token = keys.issue(client, end_of_epoch);
        let next = keys.issue(client, end_of_epoch + 1);
        assert!(keys.check(&token, client, end_of_epoch + 600).is_ok());
        assert!(keys.check(&next, client, end_of_epoch + 600).is_ok());
    }

    #[test]
    fn servers_that_share_the_secret_accept_each_others_tokens() {
        let client = CLIENT.parse().unwrap();
        let token = keys().issue(client, 1_000_000);
        assert!(keys().check(&token, client, 1_000_300).is_ok());
        let mut other = TokenKeys::new([8; 16], LIFETIME);
        assert_eq!(other.check(&token, client, 1_000_300), Err(TokenError::Forged));
    }

    #[test]
    fn a_token_proves_one_address_and_port() {
        let mut keys = keys();
        let token = keys.issue(CLIENT.parse().unwrap(), 1_000_000);
        for other in ["192.0.2.2:40000", "192.0.2.1:40001", "[2001:db8::1]:40000"] {
            assert_eq!(keys.check(&token, other.parse().unwrap(), 1_000_000), Err(TokenError::Forged));
        }
        assert!(keys.check(&token, "[::ffff:192.0.2.1]:40000".parse().unwrap(), 1_000_000).is_ok());
    }

    proptest! {
        #[test]
        fn a_token_with_any_bit_changed_proves_nothing(bit in 0..TOKEN_BYTES * 8, now in 0..u64::from(u32::MAX) * 2) {
            let client = CLIENT.parse().unwrap();
            let mut keys = keys();
            let mut token = keys.issue(client, now);
            prop_assert!(keys.check(&token, client, now).is_ok());
            token[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(keys.check(&token, client, now).is_err());
        }

        #[test]
        fn any_bytes_are_refused_as_a_token(bytes: Vec<u8>, now in 0..u64::from(u32::MAX) * 2) {
            prop_assert!(keys().check(&bytes, CLIENT.parse().unwrap(), now).is_err());
        }
    }
}
