//! Rules about what is asked for: path and cookie (the paper's table 1).

use std::cmp::Reverse;
use std::fmt;
use std::str::FromStr;

use tidegate_core::Verdict;

use crate::{Class, Profile, When};

/// Which paths a rule is about. Literal bytes; a query is not part of the path.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum PathPattern {
    /// `*`
    Any,
    /// `/shop.html`
    Exact(String),
    /// `/cgi-bin/*`
    Prefix(String),
    /// `*.php`
    Suffix(String),
    /// `*noaccess*`
    Infix(String),
}

/// Why a text is not a path pattern.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PathPatternError {
    /// A star between other characters.
    #[error("a star may stand at the beginning and at the end only")]
    InnerStar,
    /// A pattern without a star at the beginning that cannot match any path.
    #[error("a path begins with / or the pattern with *")]
    Relative,
    /// A character that no path contains.
    #[error("a path contains no space, control character, ? or #")]
    Character,
    /// Longer than a request target may be.
    #[error("longer than {max} bytes")]
    TooLong {
        /// The greatest length in bytes.
        max: usize,
    },
}

impl PathPattern {
    const MAX_BYTES: usize = 1024;

    /// Whether `path`, without its query, is meant.
    pub fn matches(&self, path: &[u8]) -> bool {
        match self {
            Self::Any => true,
            Self::Exact(text) => path == text.as_bytes(),
            Self::Prefix(text) => path.starts_with(text.as_bytes()),
            Self::Suffix(text) => path.ends_with(text.as_bytes()),
            Self::Infix(text) => path.windows(text.len()).any(|window| window == text.as_bytes()),
        }
    }

    /// The same in lower case, for servers that do not tell cases apart.
    pub fn to_ascii_lowercase(&self) -> Self {
        match self {
            Self::Any => Self::Any,
            Self::Exact(text) => Self::Exact(text.to_ascii_lowercase()),
            Self::Prefix(text) => Self::Prefix(text.to_ascii_lowercase()),
            Self::Suffix(text) => Self::Suffix(text.to_ascii_lowercase()),
            Self::Infix(text) => Self::Infix(text.to_ascii_lowercase()),
        }
    }

    /// The literal bytes.
    pub fn literal(&self) -> &str {
        match self {
            Self::Any => "",
            Self::Exact(text) | Self::Prefix(text) | Self::Suffix(text) | Self::Infix(text) => text,
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Exact(_) => 0,
            Self::Prefix(_) => 1,
            Self::Suffix(_) => 2,
            Self::Infix(_) => 3,
            Self::Any => 4,
        }
    }
}

impl FromStr for PathPattern {
    type Err = PathPatternError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() > Self::MAX_BYTES {
            return Err(PathPatternError::TooLong { max: Self::MAX_BYTES });
        }
        let (open, rest) = text.strip_prefix('*').map_or((false, text), |rest| (true, rest));
        let (literal, close) = rest.strip_suffix('*').map_or((rest, false), |rest| (rest, true));
        if literal.contains('*') {
            return Err(PathPatternError::InnerStar);
        }
        if literal.bytes().any(|byte| byte <= b' ' || byte == 0x7f || byte == b'?' || byte == b'#') {
            return Err(PathPatternError::Character);
        }
        if literal.is_empty() && (open || close) {
            return Ok(Self::Any);
        }
        if !open && !literal.starts_with('/') {
            return Err(PathPatternError::Relative);
        }
        let literal = literal.to_owned();
        Ok(match (open, close) {
            (false, false) => Self::Exact(literal),
            (false, true) => Self::Prefix(literal),
            (true, false) => Self::Suffix(literal),
            (true, true) => Self::Infix(literal),
        })
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Exact(text) => f.write_str(text),
            Self::Prefix(text) => write!(f, "{text}*"),
            Self::Suffix(text) => write!(f, "*{text}"),
            Self::Infix(text) => write!(f, "*{text}*"),
        }
    }
}

/// A cookie that a request must carry: name and value, to the byte.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct CookiePattern {
    name: String,
    value: String,
}

/// Why a name and value are not a cookie (RFC 6265 §4.1.1).
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CookiePatternError {
    /// The name is no token.
    #[error("a cookie's name is one or more letters, digits or !#$%&'*+-.^_`|~")]
    Name,
    /// The value has a character that no cookie has.
    #[error("a cookie's value contains no space, control character, comma, semicolon, backslash or quote")]
    Value,
}

impl CookiePattern {
    /// A cookie `name=value`.
    pub fn new(name: &str, value: &str) -> Result<Self, CookiePatternError> {
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if name.is_empty() || !name.bytes().all(token) {
            return Err(CookiePatternError::Name);
        }
        let octet = |byte: u8| byte.is_ascii_graphic() && !b"\",;\\".contains(&byte);
        if !value.bytes().all(octet) {
            return Err(CookiePatternError::Value);
        }
        Ok(Self { name: name.to_owned(), value: value.to_owned() })
    }

    /// Whether the value of a `Cookie` field has this cookie among its pairs (RFC 6265 §4.2.1).
    pub fn matches(&self, field_value: &[u8]) -> bool {
        field_value.split(|byte| *byte == b';').any(|pair| {
            let pair = pair.trim_ascii();
            pair.strip_prefix(self.name.as_bytes())
                .and_then(|rest| rest.strip_prefix(b"="))
                .is_some_and(|value| value == self.value.as_bytes())
        })
    }
}

impl fmt::Display for CookiePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}

/// What happens to a request that violates a rule.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Action {
    /// The segment is ignored; the client's retransmission is asked again.
    Drop,
    /// Both ends are reset (the paper's section 3.3).
    Reset,
    /// 503 with `Retry-After`. Only a server can say that, so the kernel leaves it to one.
    Refuse,
}

/// A rule of the URL action table. Of the rules that match a request the first governs: rules with a cookie before
/// those without, then the longest literal path, then exact before prefix, suffix and infix, then the configuration's
/// order.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRule {
    /// The path.
    pub path: PathPattern,
    /// The cookie that the request must carry.
    pub cookie: Option<CookiePattern>,
    /// Requests per second and at once. `None` with an action: every match is a violation.
    pub limit: Option<Profile>,
    /// When the limit acts.
    pub when: When,
    /// What happens on violation; with a limit and without an action, [`Action::Reset`].
    pub action: Option<Action>,
    /// The priority class; `None`: the lowest.
    pub class: Option<Class>,
}

impl RequestRule {
    /// What happens on violation; `None`: nothing is a violation.
    pub fn violation(&self) -> Option<Action> {
        self.action.or(self.limit.map(|_| Action::Reset))
    }

    /// What becomes of a request under this rule.
    pub fn verdict(&self, compliant: bool) -> Verdict {
        match self.violation() {
            Some(Action::Drop) if !compliant => Verdict::Drop,
            Some(Action::Reset) if !compliant => Verdict::Reset,
            Some(Action::Refuse) if !compliant => Verdict::Refuse,
            _ => Verdict::Continue,
        }
    }

    fn order(&self) -> (bool, Reverse<usize>, u8) {
        (self.cookie.is_none(), Reverse(self.path.literal().len()), self.path.kind())
    }
}

impl fmt::Display for RequestRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        if let Some(cookie) = &self.cookie {
            write!(f, " cookie {cookie}")?;
        }
        if let Some(limit) = self.limit {
            write!(f, " rate={} burst={}", limit.rate_per_s(), limit.burst())?;
            if self.when == When::Overload {
                f.write_str(" on overload")?;
            }
        }
        match self.violation() {
            None => Ok(()),
            Some(Action::Drop) => f.write_str(" drop"),
            Some(Action::Reset) => f.write_str(" reset"),
            Some(Action::Refuse) => f.write_str(" refuse"),
        }?;
        self.class.map_or(Ok(()), |class| write!(f, " priority={}", u16::from(class) + 1))
    }
}

/// Request rules in the order in which they are asked.
#[derive(Clone, Debug, Default)]
pub struct RequestTable {
    rules: Vec<RequestRule>,
    by_rank: Vec<usize>,
}

impl RequestTable {
    /// The most rules of one set.
    pub const MAX_RULES: usize = 4096;

    /// Orders rules. Beyond [`Self::MAX_RULES`] the rest would never be asked, so the caller checks.
    pub fn new(rules: &[RequestRule]) -> Self {
        let mut by_rank: Vec<usize> = (0..rules.len()).collect();
        by_rank.sort_by_key(|&index| (rules[index].order(), index));
        Self { rules: rules.to_vec(), by_rank }
    }

    /// The rules, as they were given.
    pub fn rules(&self) -> &[RequestRule] {
        &self.rules
    }

    /// Indexes of the rules, the first asked first.
    pub fn by_rank(&self) -> &[usize] {
        &self.by_rank
    }

    /// Index of the rule that governs a request. `path` without its query; `cookie` is the value of the `Cookie` field.
    pub fn lookup(&self, path: &[u8], cookie: Option<&[u8]>) -> Option<usize> {
        self.by_rank.iter().copied().find(|&index| {
            let rule = &self.rules[index];
            rule.path.matches(path)
                && rule.cookie.as_ref().is_none_or(|wanted| cookie.is_some_and(|field| wanted.matches(field)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(path: &str) -> RequestRule {
        let path = path.parse().unwrap();
        RequestRule { path, cookie: None, limit: None, when: When::Always, action: None, class: None }
    }

    #[test]
    fn patterns_read_print_and_match() {
        for (text, yes, no) in [
            ("*", "/x", None),
            ("/shop.html", "/shop.html", Some("/shop.html2")),
            ("/cgi-bin/*", "/cgi-bin/a", Some("/x/cgi-bin/a")),
            ("*.php", "/a.php", Some("/a.php5")),
            ("*noaccess*", "/a/noaccess/b", Some("/a/noacces")),
        ] {
            let pattern: PathPattern = text.parse().unwrap();
            assert_eq!(pattern.to_string(), text);
            assert!(pattern.matches(yes.as_bytes()), "{text}");
            assert!(no.is_none_or(|no| !pattern.matches(no.as_bytes())), "{text}");
        }
    }

    #[test]
    fn malformed_patterns_say_what_is_wrong() {
        assert_eq!("/a*b".parse::<PathPattern>(), Err(PathPatternError::InnerStar));
        assert_eq!("shop".parse::<PathPattern>(), Err(PathPatternError::Relative));
        assert_eq!("/a b".parse::<PathPattern>(), Err(PathPatternError::Character));
        assert_eq!("".parse::<PathPattern>(), Err(PathPatternError::Relative));
        assert!("x".repeat(2000).parse::<PathPattern>().is_err());
    }

    #[test]
    fn cookie_is_matched_by_whole_name_and_value() {
        let gold = CookiePattern::new("tier", "gold").unwrap();
        for yes in ["tier=gold", "a=b; tier=gold", "tier=gold; a=b", "a=b;tier=gold ;c"] {
            assert!(gold.matches(yes.as_bytes()), "{yes}");
        }
        for no in ["", "tier=golden", "xtier=gold", "a=tier=gold", "tier=gold2; tier", "tier = gold"] {
            assert!(!gold.matches(no.as_bytes()), "{no}");
        }
        assert_eq!(CookiePattern::new("", "x"), Err(CookiePatternError::Name));
        assert_eq!(CookiePattern::new("a", "x;y"), Err(CookiePatternError::Value));
    }

    #[test]
    fn longest_literal_governs_and_cookies_come_first() {
        let mut gold = rule("*");
        gold.cookie = Some(CookiePattern::new("tier", "gold").unwrap());
        let rules = [rule("/a/*"), rule("/a/bb"), rule("*.gif"), rule("/a/bb*"), gold, rule("*")];
        let table = RequestTable::new(&rules);
        let ask = |path: &str, cookie: &str| table.lookup(path.as_bytes(), Some(cookie.as_bytes()));
        assert_eq!(ask("/a/bb", ""), Some(1));
        assert_eq!(ask("/a/bbc", ""), Some(3));
        assert_eq!(ask("/a/x", ""), Some(0));
        assert_eq!(ask("/a/x.gif", ""), Some(2));
        assert_eq!(ask("/x", ""), Some(5));
        assert_eq!(ask("/a/bb", "tier=gold"), Some(4));
    }
}
