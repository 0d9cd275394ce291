//! What an operator changes of the fields of messages on their way through.

use crate::chars::{is_token, is_value};
use crate::field::FieldId;
use crate::forward::{imitates_known_field, is_hop_by_hop, is_method_override, is_proxy_field, write_field};

/// Which messages a rule is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RuledMessage {
    /// Requests to an upstream.
    Request,
    /// Responses to clients.
    Response,
}

/// What is done to the field lines with a name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FieldChange {
    /// They are left out.
    Remove,
    /// One line takes their place, or is there where there was none.
    Set,
    /// One line more.
    Add,
    /// One line where there is none.
    Default,
}

/// Why there is no such rule.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum FieldRuleError {
    /// RFC 9110 §5.1.
    #[error("expected the name of a field: letters, digits and any of !#$%&'*+-.^_`|~")]
    Name,
    /// RFC 9110 §5.5.
    #[error("expected a field's value: visible characters, with spaces between them alone")]
    Value,
    /// Messages have their own, or have it for a connection or for the bytes that follow.
    #[error("this field is tidegate's to say")]
    Reserved,
    /// One value cannot be that of every response.
    #[error("it is different for each response, and can only be removed")]
    Individual,
    /// Every request has one (RFC 9112 §3.2).
    #[error("it is in every request, once, and can only be set")]
    Host,
    /// [`RuledMessage::Request`] with an authority that is none.
    #[error("expected a host name or an address, with or without a port")]
    Authority,
    /// To CGI and its descendants an underscore is a hyphen.
    #[error("write it with hyphens")]
    Underscore,
}

/// The name of a field, as it is to be written.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Name {
    id: FieldId,
    text: Box<[u8]>,
}

impl Name {
    fn is(&self, id: FieldId, name: &[u8]) -> bool {
        match self.id {
            FieldId::Other => id == FieldId::Other && is_alike(&self.text, name),
            known => id == known,
        }
    }
}

/// Whether some server takes the names for the same: to CGI and its descendants an underscore is a hyphen.
fn is_alike(a: &[u8], b: &[u8]) -> bool {
    let fold = |byte: &u8| if *byte == b'_' { b'-' } else { byte.to_ascii_lowercase() };
    a.len() == b.len() && a.iter().map(fold).eq(b.iter().map(fold))
}

/// A field line that is written.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Line {
    name: Name,
    value: Box<[u8]>,
    /// It lets caches reuse the response, which nobody means of errors.
    permits_reuse: bool,
}

impl Line {
    fn new(name: Name, value: &[u8]) -> Self {
        let permits_reuse = match name.id {
            FieldId::Expires => true,
            FieldId::CacheControl | FieldId::CdnCacheControl | FieldId::SurrogateControl => {
                let mut directives = value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
                let forbids = |directive: &[u8]| {
                    [&b"no-store"[..], b"no-cache", b"private"]
                        .iter()
                        .any(|known| directive.eq_ignore_ascii_case(known))
                };
                !directives.any(forbids)
            }
            _ => false,
        };
        Self { name, value: value.into(), permits_reuse }
    }

    fn is_said(&self, of: Said) -> bool {
        of != Said::OfAnError || !self.permits_reuse
    }

    fn write(&self, out: &mut Vec<u8>) {
        write_field(&self.name.text, &self.value, out);
    }
}

/// What the lines that are written are said of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Said {
    /// Any request, or a response below 400.
    OfAnything,
    /// A response of 400 or above: how long one may be reused is not said of it, or a page that was missing for a moment
    /// would be missing for as long.
    OfAnError,
    /// A message about another one, such as a 304: what it says replaces what that says (RFC 9111 §3.2), so that lines which
    /// are added to what is there, or stand where there are none, are not in it.
    OfAnother,
}

impl Said {
    /// Of a response with this status.
    pub fn of_status(status: u16) -> Self {
        match status {
            304 => Self::OfAnother,
            400.. => Self::OfAnError,
            _ => Self::OfAnything,
        }
    }
}

/// Changes to the fields of messages that are passed on; by default none.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct FieldRules {
    remove: Vec<Name>,
    set: Vec<Line>,
    add: Vec<Line>,
    default: Vec<Line>,
    host: Option<Box<[u8]>>,
}

impl FieldRules {
    /// No changes.
    pub const NONE: &'static Self =
        &Self { remove: Vec::new(), set: Vec::new(), add: Vec::new(), default: Vec::new(), host: None };

    /// Adds a rule. `value` is of no account where lines are removed.
    ///
    /// # Errors
    /// Name or value are none, or the field is not the operator's to change so.
    pub fn change(
        &mut self,
        message: RuledMessage,
        change: FieldChange,
        name: &str,
        value: &str,
    ) -> Result<(), FieldRuleError> {
        let (name, value) = (name.as_bytes(), value.as_bytes());
        if name.is_empty() || !name.iter().copied().all(is_token) {
            return Err(FieldRuleError::Name);
        }
        let id = FieldId::from_name(name);
        check(message, change, id, name)?;
        let name = Name { id, text: name.into() };
        let is_trimmed = value.trim_ascii().len() == value.len() && !value.is_empty();
        if change != FieldChange::Remove && !(is_trimmed && value.iter().copied().all(is_value)) {
            return Err(FieldRuleError::Value);
        }
        if (message, id) == (RuledMessage::Request, FieldId::Host) {
            if !value.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]".contains(byte)) {
                return Err(FieldRuleError::Authority);
            }
            self.host = Some(value.into());
            return Ok(());
        }
        match change {
            FieldChange::Remove => self.remove.push(name),
            FieldChange::Set => self.set.push(Line::new(name, value)),
            FieldChange::Add => self.add.push(Line::new(name, value)),
            FieldChange::Default => self.default.push(Line::new(name, value)),
        }
        Ok(())
    }

    /// Whether nothing is changed.
    #[inline]
    pub fn is_empty(&self) -> bool {
        *self == *Self::NONE
    }

    /// The `Host` that requests get in the place of their own.
    pub fn host(&self) -> Option<&[u8]> {
        self.host.as_deref()
    }

    /// Whether a line with this name is left out, for good or because another one takes its place.
    pub fn removes(&self, id: FieldId, name: &[u8], of: Said) -> bool {
        self.remove.iter().any(|known| known.is(id, name))
            || self.set.iter().any(|line| line.name.is(id, name) && line.is_said(of))
    }

    /// Appends the lines that are set, those that are added, and those that are missing: `has_kept` says whether a line
    /// whose name fits has been passed on.
    pub fn write(
        &self,
        of: Said,
        has_kept: impl Fn(&dyn Fn(FieldId, &[u8]) -> bool) -> bool,
        out: &mut Vec<u8>,
    ) {
        let said = |line: &&Line| line.is_said(of);
        self.set.iter().filter(said).for_each(|line| line.write(out));
        if of == Said::OfAnother {
            return;
        }
        self.add.iter().filter(said).for_each(|line| line.write(out));
        let is_written = |name: &Name| {
            self.set.iter().chain(&self.add).filter(said).any(|line| line.name.is(name.id, &name.text))
        };
        for line in self.default.iter().filter(said) {
            if !is_written(&line.name) && !has_kept(&|id, kept| line.name.is(id, kept)) {
                line.write(out);
            }
        }
    }
}

fn check(message: RuledMessage, change: FieldChange, id: FieldId, name: &[u8]) -> Result<(), FieldRuleError> {
    if imitates_known_field(name) {
        return Err(FieldRuleError::Underscore);
    }
    if is_hop_by_hop(id) || matches!(id, FieldId::ContentLength | FieldId::Via) || is_proxy_field(name) {
        return Err(FieldRuleError::Reserved);
    }
    match message {
        RuledMessage::Request if id == FieldId::Host && change != FieldChange::Set => {
            Err(FieldRuleError::Host)
        }
        RuledMessage::Request if is_own_of_requests(id, name) => Err(FieldRuleError::Reserved),
        RuledMessage::Response if is_own_of_responses(id) => Err(FieldRuleError::Reserved),
        RuledMessage::Response
            if matches!(id, FieldId::Etag | FieldId::LastModified) && change != FieldChange::Remove =>
        {
            Err(FieldRuleError::Individual)
        }
        _ => Ok(()),
    }
}

/// Who asks, by which way and for which part is ours to say to an upstream.
fn is_own_of_requests(id: FieldId, name: &[u8]) -> bool {
    matches!(
        id,
        FieldId::Expect
            | FieldId::Forwarded
            | FieldId::IfMatch
            | FieldId::IfModifiedSince
            | FieldId::IfNoneMatch
            | FieldId::IfRange
            | FieldId::IfUnmodifiedSince
            | FieldId::MaxForwards
            | FieldId::Range
            | FieldId::XForwardedFor
            | FieldId::XForwardedHost
            | FieldId::XForwardedProto
    ) || name.eq_ignore_ascii_case(b"surrogate-capability")
        || is_method_override(name)
}

/// Which bytes follow, and where they come from, is ours to say to a client.
fn is_own_of_responses(id: FieldId) -> bool {
    matches!(
        id,
        FieldId::AcceptRanges
            | FieldId::Age
            | FieldId::CacheStatus
            | FieldId::ContentEncoding
            | FieldId::ContentRange
            | FieldId::Date
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use FieldChange::{Add, Default, Remove, Set};
    use RuledMessage::{Request, Response};
    use Said::{OfAnError, OfAnother, OfAnything};

    fn refused(
        message: RuledMessage,
        change: FieldChange,
        name: &str,
        value: &str,
    ) -> Option<FieldRuleError> {
        FieldRules::default().change(message, change, name, value).err()
    }

    #[test]
    fn what_is_not_the_operators_to_say_is_refused() {
        for (message, name) in [
            (Request, "Connection"),
            (Request, "content-length"),
            (Request, "X-Forwarded-For"),
            (Request, "If-None-Match"),
            (Request, "Range"),
            (Request, "Proxy"),
            (Request, "X-HTTP-Method-Override"),
            (Response, "Transfer-Encoding"),
            (Response, "Content-Encoding"),
            (Response, "Age"),
            (Response, "Via"),
        ] {
            for change in [Set, Add, Default, Remove] {
                assert_eq!(refused(message, change, name, "x"), Some(FieldRuleError::Reserved), "{name}");
            }
        }
        assert_eq!(refused(Response, Set, "ETag", "\"a\""), Some(FieldRuleError::Individual));
        assert_eq!(refused(Response, Remove, "ETag", ""), None);
        assert_eq!(refused(Request, Remove, "Host", ""), Some(FieldRuleError::Host));
        assert_eq!(refused(Request, Set, "Host", "a b"), Some(FieldRuleError::Authority));
        assert_eq!(refused(Request, Set, "Host", "[::1]:80"), None);
        assert_eq!(refused(Request, Set, "Cache_Control", "x"), Some(FieldRuleError::Underscore));
    }

    #[test]
    fn a_line_is_one_line() {
        for name in ["", "a b", "a:", "a\r\nb", "ä"] {
            assert_eq!(refused(Request, Set, name, "x"), Some(FieldRuleError::Name), "{name:?}");
        }
        for value in ["", " a", "a ", "\t", "a\r\nb: c", "a\nb", "a\0", "\x7f"] {
            assert_eq!(refused(Response, Add, "X-A", value), Some(FieldRuleError::Value), "{value:?}");
        }
    }

    #[test]
    fn a_missing_line_is_one_that_nobody_has_written() {
        let mut rules = FieldRules::default();
        rules.change(Response, Set, "X-A", "set").unwrap();
        rules.change(Response, Add, "X-B", "added").unwrap();
        for name in ["X-A", "X-B", "Cache-Control", "X-C", "X-D"] {
            rules.change(Response, Default, name, "default").unwrap();
        }
        let kept = [(FieldId::CacheControl, &b"cache-control"[..]), (FieldId::Other, b"x-c")];
        let mut out = Vec::new();
        rules.write(OfAnything, |is_named| kept.iter().any(|(id, name)| is_named(*id, name)), &mut out);
        assert_eq!(String::from_utf8(out).unwrap(), "X-A: set\r\nX-B: added\r\nX-D: default\r\n");
        assert!(rules.removes(FieldId::Other, b"x_a", OfAnything));
        assert!(!rules.removes(FieldId::Other, b"X-B", OfAnything));
    }

    #[test]
    fn what_is_said_of_errors_lets_nobody_keep_them_and_of_others_adds_nothing() {
        let mut rules = FieldRules::default();
        rules.change(Response, Set, "Cache-Control", "max-age=31536000, immutable").unwrap();
        rules.change(Response, Add, "CDN-Cache-Control", "no-store").unwrap();
        rules.change(Response, Default, "Expires", "Thu, 01 Jan 2037 00:00:00 GMT").unwrap();
        rules.change(Response, Default, "X-Frame-Options", "DENY").unwrap();
        let written = |of| {
            let mut out = Vec::new();
            rules.write(of, |_| false, &mut out);
            String::from_utf8(out).unwrap()
        };
        assert_eq!(written(Said::of_status(200)).lines().count(), 4);
        assert_eq!(written(Said::of_status(404)), "CDN-Cache-Control: no-store\r\nX-Frame-Options: DENY\r\n");
        assert_eq!(written(Said::of_status(304)), "Cache-Control: max-age=31536000, immutable\r\n");
        let removes = |of| rules.removes(FieldId::CacheControl, b"Cache-Control", of);
        assert_eq!([OfAnything, OfAnError, OfAnother].map(removes), [true, false, true]);
    }
}
