//! Why somebody was refused: one table, a row for each reason.

macro_rules! reasons {
    ($($(#[$meta:meta])* $variant:ident $name:literal $metric:ident $text:literal,)*) => {
        /// Why a connection or a request was refused, held back or challenged.
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[non_exhaustive]
        pub enum Reason { $($(#[$meta])* #[doc = $text] $variant,)* }

        impl Reason {
            /// Every reason, in the order of the table.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Stable lower-case name: the same in the configuration, logs and metrics.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The counter of what was decided for this reason, without the `tidegate_` prefix.
            pub const fn metric(self) -> &'static str {
                match self { $(Self::$variant => concat!("defence_", stringify!($metric), "_total"),)* }
            }

            /// The counter of what would have been decided, were the rule not only tried out.
            pub const fn dry_run_metric(self) -> &'static str {
                match self { $(Self::$variant => concat!("defence_", stringify!($metric), "_dry_run_total"),)* }
            }

            /// The sentence that explains the counter.
            pub const fn help(self) -> &'static str {
                match self { $(Self::$variant => concat!("Decisions about clients: ", $text, "."),)* }
            }

            /// What is logged, and shown to operators.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

reasons! {
    RequestRate "request-rate" request_rate "more requests than one client may make",
    ConnectionRate "connection-rate" connection_rate "more new connections than one client may open",
    Connections "connections" connections "more connections open at once than one client may have",
    Errors "errors" errors "too many requests that ended in an error, such as failed logins or unknown pages",
    UpstreamTime "upstream-time" upstream_time "took far more of the upstreams' time than others",
    CacheBusting "cache-busting" cache_busting "asked for many URLs that nobody had asked for before, past the cache",
    Ranges "ranges" ranges "asked again and again for parts of responses that are tiny, or that it had asked for before",
    Swarm "swarm" swarm "one of many in a network prefix who together do what none of the site's usual clients does",
    Slow "slow" slow "kept connections waiting: heads, bodies or reading below the minimum rate",
    Form "form" form "a request whose method, content type or character set is not allowed",
    Listed "listed" listed "is on the list of what operators, files of theirs or others have blocked",
    Blocked "blocked" blocked "is blocked for what it did before",
    External "external" external "an external classifier said so",
    Content "content" content "an ICAP service refused the content",
    Stress "stress" made_room "the server is under stress and makes room for others",
}

#[cfg(test)]
mod tests {
    use super::Reason;
    use std::collections::HashSet;

    #[test]
    fn names_and_metrics_tell_reasons_apart() {
        let names: HashSet<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        let metrics: HashSet<_> = Reason::ALL.iter().map(|reason| reason.metric()).collect();
        assert_eq!((names.len(), metrics.len()), (Reason::ALL.len(), Reason::ALL.len()));
        assert!(Reason::ALL.iter().enumerate().all(|(index, reason)| *reason as usize == index));
    }
}
