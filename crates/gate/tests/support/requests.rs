//! Request rules, and heads of requests.

use tidegate_policy::{Action, CookiePattern, PortRange, Profile, RequestRule, RuleSet, When};

/// Rates so slow that no token comes back while a test runs.
pub const SLOW: f64 = 0.001;

/// A rule without a limit.
pub fn rule(path: &str, action: Option<Action>) -> RequestRule {
    let path = path.parse().unwrap();
    RequestRule { path, cookie: None, limit: None, when: When::Always, action, class: None }
}

/// A rule whose bucket fills once.
pub fn limited(path: &str, burst: u32, action: Action) -> RequestRule {
    RequestRule { limit: Some(Profile::new(SLOW, burst).unwrap()), ..rule(path, Some(action)) }
}

/// The same rule, for requests with a cookie.
pub fn with_cookie(name: &str, value: &str, rule: RequestRule) -> RequestRule {
    RequestRule { cookie: Some(CookiePattern::new(name, value).unwrap()), ..rule }
}

/// These rules, for port 80.
pub fn set(requests: Vec<RequestRule>) -> RuleSet {
    RuleSet { requests, http_ports: vec![PortRange::one(80)], ..RuleSet::default() }
}

/// A head in one piece.
pub fn head(method: &str, target: &str, cookie: Option<&str>) -> String {
    let cookie = cookie.map(|value| format!("Cookie: {value}\r\n")).unwrap_or_default();
    format!("{method} {target} HTTP/1.1\r\nHost: a\r\n{cookie}User-Agent: x\r\n\r\n")
}
