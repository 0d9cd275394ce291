use std::time::Duration;

/// What a hook decided about a connection or a request. The first verdict other than `Continue` ends the chain.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Verdict {
    /// No objection: the next hook is asked.
    #[default]
    Continue,
    /// Hold the work back for a bounded time, then go on as if nothing had been said.
    Delay,
    /// Answer with an error that tells the client to come back (429 or 503 with Retry-After).
    Refuse,
    /// Answer with a task that a browser solves by itself and most programs do not.
    Challenge,
    /// Hold the connection without an answer for a bounded time, then end it.
    Tarpit,
    /// End the connection with a reset.
    Reset,
    /// End the connection, or ignore the packet, without any answer.
    Drop,
    /// Refuse this and whatever else comes from the client for that long.
    Block(Duration),
}
