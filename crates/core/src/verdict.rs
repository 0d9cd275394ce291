/// What a hook decided about a connection or a request. The first verdict other than `Continue` ends the chain.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Verdict {
    /// No objection: the next hook is asked.
    #[default]
    Continue,
    /// Hold the work back and ask again later.
    Delay,
    /// Answer with an error that tells the client to come back (503 with Retry-After).
    Refuse,
    /// End the connection with a reset.
    Reset,
    /// End the connection, or ignore the packet, without any answer.
    Drop,
}
