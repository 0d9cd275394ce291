//! The rules enforced without a kernel program: at accept, and on requests that no segment shows.

use std::net::IpAddr;

use tidegate_core::Verdict;

use crate::{
    Class, ConnectionTable, PortRange, Profile, RequestTable, RuleSet, TableError, TokenBucket, When,
};

/// What a policer decided.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Decision {
    /// Whether to go on.
    pub verdict: Verdict,
    /// The priority class; 0 is served first.
    pub class: Class,
    /// Index of the rule that governs, in the order of the configuration.
    pub rule: Option<usize>,
}

/// How often a rule let pass and refused.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RuleCounts {
    /// Compliant connections or requests.
    pub passed: u64,
    /// Violations.
    pub refused: u64,
}

#[derive(Clone, Copy, Debug)]
struct State {
    bucket: Option<TokenBucket>,
    counts: RuleCounts,
}

impl State {
    fn take(&mut self, limit: Option<Profile>, now_ns: u64) -> bool {
        let compliant = match limit {
            None => true,
            Some(profile) => {
                self.bucket.get_or_insert_with(|| TokenBucket::full(&profile, now_ns)).take(&profile, now_ns)
            }
        };
        self.count(compliant);
        compliant
    }

    /// What was let pass is refused by another limit: the rule has its token back, and counts a refusal.
    fn give_back(&mut self, limit: Option<Profile>) {
        if let (Some(profile), Some(bucket)) = (limit, &mut self.bucket) {
            bucket.give_back(&profile);
        }
        self.counts.passed -= 1;
        self.counts.refused += 1;
    }

    fn count(&mut self, compliant: bool) {
        if compliant {
            self.counts.passed += 1;
        } else {
            self.counts.refused += 1;
        }
    }
}

/// Decides on connections and requests by the same rules, tables and buckets as the kernel programs.
#[derive(Debug)]
pub struct Policer {
    connections: ConnectionTable,
    requests: RequestTable,
    connection_states: Vec<State>,
    request_states: Vec<State>,
    lowest: Class,
    only_ports: Vec<PortRange>,
    overloaded: bool,
    class_limits: Option<ClassLimits>,
}

/// What the adaptation agent has set.
#[derive(Clone, Debug)]
struct ClassLimits {
    by_connection: bool,
    by_request: bool,
    limits: Vec<(Option<Profile>, State)>,
}

impl ClassLimits {
    fn take(&mut self, class: Class, now_ns: u64) -> bool {
        let index = usize::from(class).min(self.limits.len() - 1);
        let (limit, state) = &mut self.limits[index];
        state.take(*limit, now_ns)
    }
}

impl Policer {
    /// Compiles a rule set.
    pub fn new(rules: &RuleSet) -> Result<Self, TableError> {
        let fresh = State { bucket: None, counts: RuleCounts::default() };
        Ok(Self {
            connections: ConnectionTable::compile(&rules.connections)?,
            requests: RequestTable::new(&rules.requests),
            connection_states: vec![fresh; rules.connections.len()],
            request_states: vec![fresh; rules.requests.len()],
            // At most MAX_CLASSES, checked by `compile`.
            lowest: (rules.classes() - 1) as Class,
            only_ports: rules.only_ports.clone(),
            overloaded: false,
            class_limits: None,
        })
    }

    /// Puts other rules in force. A rule that matches what a rule before matched keeps its tokens and counters; on
    /// error nothing has changed.
    pub fn replace(&mut self, rules: &RuleSet) -> Result<(), TableError> {
        let mut next = Self::new(rules)?;
        next.overloaded = self.overloaded;
        next.class_limits = self.class_limits.take();
        for (rule, state) in next.connections.rules().iter().zip(&mut next.connection_states) {
            let before = self
                .connections
                .rules()
                .iter()
                .position(|old| (old.destination, old.source) == (rule.destination, rule.source));
            if let Some(index) = before {
                *state = self.connection_states[index];
            }
        }
        for (rule, state) in next.requests.rules().iter().zip(&mut next.request_states) {
            let before = self
                .requests
                .rules()
                .iter()
                .position(|old| (&old.path, &old.cookie) == (&rule.path, &rule.cookie));
            if let Some(index) = before {
                *state = self.request_states[index];
            }
        }
        *self = next;
        Ok(())
    }

    /// Signals that overload has begun or ended.
    pub fn set_overload(&mut self, overloaded: bool) {
        self.overloaded = overloaded;
    }

    /// Decides on a new connection. At accept the handshake is over, so a violation is dropped by closing.
    pub fn on_connect(&mut self, source: IpAddr, destination: IpAddr, port: u16, now_ns: u64) -> Decision {
        let Some(index) = self.governing(source, destination, port) else {
            let verdict = self.class_verdict(self.lowest, true, now_ns);
            return Decision { verdict, class: self.lowest, rule: None };
        };
        let rule = &self.connections.rules()[index];
        let limit = rule.limit.filter(|_| rule.when == When::Always || self.overloaded);
        let class = rule.class.unwrap_or(self.lowest);
        let compliant = self.connection_states[index].take(limit, now_ns);
        let verdict = if compliant { self.class_verdict(class, true, now_ns) } else { Verdict::Drop };
        if compliant && verdict != Verdict::Continue {
            self.connection_states[index].give_back(limit);
        }
        Decision { verdict, class, rule: Some(index) }
    }

    /// What no rule objects to is subject to the limit of its class. A request beyond it is asked to come back.
    fn class_verdict(&mut self, class: Class, is_connection: bool, now_ns: u64) -> Verdict {
        let Some(limits) = &mut self.class_limits else { return Verdict::Continue };
        let counts =
            if is_connection { limits.by_connection } else { limits.by_request || !limits.by_connection };
        match (counts && !limits.take(class, now_ns), is_connection) {
            (false, _) => Verdict::Continue,
            (true, true) => Verdict::Drop,
            (true, false) => Verdict::Refuse,
        }
    }

    /// Puts a limit on each priority class, besides those of rules; classes beyond `limits` are unlimited. What is
    /// limited is what names the classes: connections, requests or both.
    pub fn limit_classes(
        &mut self,
        limits: &[Option<Profile>],
        by_connection: bool,
        by_request: bool,
        now_ns: u64,
    ) {
        let before = self.class_limits.take().map(|limits| limits.limits).unwrap_or_default();
        let limit = |class: usize| {
            let limit = limits.get(class).copied().flatten();
            let fresh = State {
                bucket: limit.map(|profile| TokenBucket::full(&profile, now_ns)),
                counts: RuleCounts::default(),
            };
            (limit, before.get(class).map_or(fresh, |(_, state)| *state))
        };
        let limits = (0..=usize::from(self.lowest)).map(limit).collect();
        self.class_limits = Some(ClassLimits { by_connection, by_request, limits });
    }

    /// How often each class was let pass and limited, since classes are limited.
    pub fn class_counts(&self) -> Vec<RuleCounts> {
        let limits = self.class_limits.iter().flat_map(|limits| &limits.limits);
        limits.map(|(_, state)| state.counts).collect()
    }

    /// How many classes the rules have.
    pub fn classes(&self) -> u32 {
        u32::from(self.lowest) + 1
    }

    /// The class of a connection that a kernel program has already policed.
    pub fn classify(&self, source: IpAddr, destination: IpAddr, port: u16) -> Decision {
        let rule = self.governing(source, destination, port);
        let class = rule.and_then(|index| self.connections.rules()[index].class).unwrap_or(self.lowest);
        Decision { verdict: Verdict::Continue, class, rule }
    }

    fn governing(&self, source: IpAddr, destination: IpAddr, port: u16) -> Option<usize> {
        let covered = self.only_ports.is_empty() || self.only_ports.iter().any(|range| range.contains(port));
        if covered { self.connections.lookup(source, destination, port) } else { None }
    }

    /// Decides on a request. `path` without its query; `cookie` is the value of the `Cookie` field.
    pub fn on_request(&mut self, path: &[u8], cookie: Option<&[u8]>, now_ns: u64) -> Decision {
        let Some(index) = self.requests.lookup(path, cookie) else {
            let verdict = self.class_verdict(self.lowest, false, now_ns);
            return Decision { verdict, class: self.lowest, rule: None };
        };
        let rule = &self.requests.rules()[index];
        let in_force = rule.when == When::Always || self.overloaded;
        let limit = rule.limit.filter(|_| in_force);
        let state = &mut self.request_states[index];
        let compliant = if rule.limit.is_none() && rule.action.is_some() && in_force {
            state.count(false);
            false
        } else {
            state.take(limit, now_ns)
        };
        let (class, mut verdict) = (rule.class.unwrap_or(self.lowest), rule.verdict(compliant));
        if verdict == Verdict::Continue {
            verdict = self.class_verdict(class, false, now_ns);
            if verdict != Verdict::Continue {
                self.request_states[index].give_back(limit);
            }
        }
        Decision { verdict, class, rule: Some(index) }
    }

    /// Which rule governs a request, for whoever polices it elsewhere.
    pub fn classify_request(&self, path: &[u8], cookie: Option<&[u8]>) -> Decision {
        let rule = self.requests.lookup(path, cookie);
        let class = rule.and_then(|index| self.requests.rules()[index].class).unwrap_or(self.lowest);
        Decision { verdict: Verdict::Continue, class, rule }
    }

    /// The connection rules' counters, in the order of the configuration.
    pub fn connection_counts(&self) -> Vec<RuleCounts> {
        self.connection_states.iter().map(|state| state.counts).collect()
    }

    /// The request rules' counters, in the order of the configuration.
    pub fn request_counts(&self) -> Vec<RuleCounts> {
        self.request_states.iter().map(|state| state.counts).collect()
    }

    /// The compiled connection rules.
    pub fn connections(&self) -> &ConnectionTable {
        &self.connections
    }

    /// The ordered request rules.
    pub fn requests(&self) -> &RequestTable {
        &self.requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Action, ConnectionRule, CookiePattern, RequestRule};

    fn connection(destination: &str, rate_per_s: f64, burst: u32) -> ConnectionRule {
        ConnectionRule {
            destination: destination.parse().unwrap(),
            source: None,
            limit: Some(Profile::new(rate_per_s, burst).unwrap()),
            when: When::Always,
            class: None,
        }
    }

    fn request(path: &str) -> RequestRule {
        let path = path.parse().unwrap();
        RequestRule { path, cookie: None, limit: None, when: When::Always, action: None, class: None }
    }

    fn connect(policer: &mut Policer, now_ns: u64) -> Verdict {
        policer.on_connect([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 80, now_ns).verdict
    }

    #[test]
    fn rule_on_overload_acts_only_while_overload_is_signalled() {
        let mut rule = connection("*:80", 1.0, 1);
        rule.when = When::Overload;
        let mut policer = Policer::new(&RuleSet { connections: vec![rule], ..RuleSet::default() }).unwrap();
        assert!((0..100).all(|_| connect(&mut policer, 0) == Verdict::Continue));
        policer.set_overload(true);
        assert_eq!(connect(&mut policer, 0), Verdict::Continue);
        assert_eq!(connect(&mut policer, 0), Verdict::Drop);
        policer.set_overload(false);
        assert_eq!(connect(&mut policer, 0), Verdict::Continue);
        assert_eq!(policer.connection_counts(), [RuleCounts { passed: 102, refused: 1 }]);
    }

    #[test]
    fn replaced_rules_keep_tokens_and_counters_of_what_they_match() {
        let set = |burst| RuleSet { connections: vec![connection("*:80", 1.0, burst)], ..RuleSet::default() };
        let mut policer = Policer::new(&set(3)).unwrap();
        assert!((0..3).all(|_| connect(&mut policer, 0) == Verdict::Continue));
        policer.replace(&set(5)).unwrap();
        assert_eq!(connect(&mut policer, 0), Verdict::Drop, "a reload is no fresh burst");
        assert_eq!(policer.connection_counts(), [RuleCounts { passed: 3, refused: 1 }]);
        let wrong = RuleSet {
            connections: vec![ConnectionRule { class: Some(200), ..connection("*:80", 1.0, 1) }],
            ..RuleSet::default()
        };
        assert!(policer.replace(&wrong).is_err());
        assert_eq!(policer.connection_counts().len(), 1, "the rules before stay in force");
    }

    #[test]
    fn what_its_class_has_no_token_for_is_refused_under_its_rule_and_costs_the_rule_nothing() {
        let rules = RuleSet {
            connections: vec![ConnectionRule { class: Some(0), ..connection("*:80", 1.0, 3) }],
            requests: vec![RequestRule {
                limit: Some(Profile::new(1.0, 3).unwrap()),
                class: Some(0),
                ..request("/a")
            }],
            ..RuleSet::default()
        };
        let mut policer = Policer::new(&rules).unwrap();
        let one = Some(Profile::new(1.0, 1).unwrap());
        policer.limit_classes(&[one], true, false, 0);
        assert_eq!(std::array::from_fn(|_| connect(&mut policer, 0)), [Verdict::Continue, Verdict::Drop]);
        policer.limit_classes(&[one], false, true, 1_000_000_000);
        let mut ask = |now_ns| policer.on_request(b"/a", None, now_ns).verdict;
        assert_eq!([ask(1_000_000_000), ask(1_000_000_000)], [Verdict::Continue, Verdict::Refuse]);
        let once = [RuleCounts { passed: 1, refused: 1 }];
        assert_eq!((policer.connection_counts(), policer.request_counts()), (once.to_vec(), once.to_vec()));
        // Two of three tokens are left.
        policer.limit_classes(&[], true, true, 1_000_000_000);
        assert_eq!((0..5).filter(|_| connect(&mut policer, 0) == Verdict::Continue).count(), 2);
        let mut ask = || policer.on_request(b"/a", None, 1_000_000_000).verdict;
        assert_eq!((0..5).filter(|_| ask() == Verdict::Continue).count(), 2);
    }

    #[test]
    fn requests_are_dropped_reset_refused_and_classed() {
        let requests = vec![
            RequestRule { action: Some(Action::Drop), ..request("*noaccess*") },
            RequestRule { class: Some(0), ..request("/shop.html") },
            RequestRule {
                limit: Some(Profile::new(1.0, 2).unwrap()),
                class: Some(2),
                ..request("/cgi-bin/*")
            },
            RequestRule {
                cookie: Some(CookiePattern::new("tier", "none").unwrap()),
                action: Some(Action::Refuse),
                ..request("*")
            },
        ];
        let mut policer = Policer::new(&RuleSet { requests, ..RuleSet::default() }).unwrap();
        let mut ask = |path: &str, cookie: Option<&[u8]>| {
            let decision = policer.on_request(path.as_bytes(), cookie, 0);
            (decision.verdict, decision.class)
        };
        assert_eq!(ask("/x/noaccess/y", None), (Verdict::Drop, 2));
        assert_eq!(ask("/shop.html", None), (Verdict::Continue, 0));
        assert_eq!(ask("/cgi-bin/a", None), (Verdict::Continue, 2));
        assert_eq!(ask("/cgi-bin/a", None), (Verdict::Continue, 2));
        assert_eq!(ask("/cgi-bin/a", None), (Verdict::Reset, 2));
        assert_eq!(ask("/shop.html", Some(b"tier=none")), (Verdict::Refuse, 2));
        assert_eq!(ask("/other", None), (Verdict::Continue, 2));
    }
}
