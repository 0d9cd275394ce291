//! What an operator changes of the fields of messages on their way through.

use crate::chars::{is_token, is_value};
use crate::field::FieldId;
use crate::forward::{
    ConnectionOptions, imitates_known_field, is_hop_by_hop, is_method_override, is_proxy_field, write_field,
};
use crate::head::ResponseHead;
use crate::normalize::is_authority;

/// The most that the lines of one set of rules may come to, in bytes.
const MOST_BYTES: usize = 16 * 1024;

/// Which messages a rule is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RuledMessage {
    /// Requests to an upstream.
    Request,
    /// Responses to clients.
    Response,
    /// Redirects, which are made here.
    Redirect,
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
    /// RFC 9110 §5.1. A `*` may be part of a name, and never is: whoever writes one means something else.
    #[error("expected the name of a field: letters, digits and any of !#$%&'+-.^_`|~")]
    Name,
    /// RFC 9110 §5.5.
    #[error(
        "expected a field's value: visible characters, with spaces between them alone; `remove` leaves a field out"
    )]
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
    /// [`RuledMessage::Request`] with an authority that is none (RFC 9110 §7.2).
    #[error("expected a host name or an address, with or without a port")]
    Authority,
    /// It says where to, and nothing that there would be to remove.
    #[error("a redirect has its own")]
    OfRedirect,
    /// See [`Self::OfRedirect`].
    #[error("there is nothing in a redirect that could be removed")]
    NothingToRemove,
    /// What the upstream compresses goes to clients that asked for something else.
    #[error("it can only be removed, or set to \"identity\"")]
    AcceptEncoding,
    /// To CGI and its descendants an underscore is a hyphen.
    #[error("write it with hyphens")]
    Underscore,
    /// Two lines in each other's place.
    #[error("it is there already: case does not count")]
    Repeated,
    /// More than heads have room for.
    #[error("the fields of a route come to more than {MOST_BYTES} bytes")]
    TooMuch,
}

/// The name of a field, as it is to be written.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Name {
    id: FieldId,
    text: Box<[u8]>,
}

impl Name {
    fn is(&self, id: FieldId, name: &[u8]) -> bool {
        self.id == id && (id != FieldId::Other || self.text.eq_ignore_ascii_case(name))
    }

    fn is_imitated_by(&self, name: &[u8]) -> bool {
        imitates(name, &self.text)
    }
}

/// Whether some server takes `name` for the field `other`: for CGI most make an underscore of a hyphen, and some of everything
/// else that is no letter and no digit.
pub(crate) fn imitates(name: &[u8], other: &[u8]) -> bool {
    let fold = |byte: &u8| if byte.is_ascii_alphanumeric() { byte.to_ascii_lowercase() } else { b'-' };
    name.len() == other.len()
        && name.iter().map(fold).eq(other.iter().map(fold))
        && !name.eq_ignore_ascii_case(other)
}

/// A field line that is written.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Line {
    name: Name,
    value: Box<[u8]>,
    lifetime: Option<Lifetime>,
}

/// A line says how long a response may be reused.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Lifetime {
    /// By everybody, whatever the response says to its client alone.
    is_public: bool,
}

impl Line {
    fn new(name: Name, value: &[u8]) -> Self {
        let lifetime = speaks_of_reuse(name.id, &name.text).then(|| lifetime(name.id, value)).flatten();
        Self { name, value: value.into(), lifetime }
    }

    fn bytes(&self) -> usize {
        self.name.text.len() + self.value.len() + 4
    }

    fn write(&self, out: &mut Vec<u8>) {
        write_field(&self.name.text, &self.value, out);
    }
}

/// Whether a field says who may reuse a response, and for how long: to caches as such, or to those that it names (RFC 9213
/// §2.1).
fn speaks_of_reuse(id: FieldId, name: &[u8]) -> bool {
    let targeted = name.len().checked_sub(b"cache-control".len()).and_then(|start| name.get(start..));
    matches!(id, FieldId::Expires | FieldId::Pragma | FieldId::SurrogateControl)
        || targeted.is_some_and(|end| end.eq_ignore_ascii_case(b"cache-control"))
        || name.eq_ignore_ascii_case(b"edge-control")
}

/// What a line gives of a lifetime: nothing if it only restricts.
fn lifetime(id: FieldId, value: &[u8]) -> Option<Lifetime> {
    const PERMISSIONS: [&[u8]; 6] =
        [b"max-age", b"s-maxage", b"stale-while-revalidate", b"stale-if-error", b"immutable", b"public"];
    let mut found = (id == FieldId::Expires).then_some(Lifetime { is_public: false });
    for directive in value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
        let (name, argument) = match directive.iter().position(|byte| *byte == b'=') {
            Some(at) => (&directive[..at], directive[at + 1..].trim_ascii()),
            None => (directive, &b""[..]),
        };
        let is_none = !argument.is_empty() && argument.iter().all(|byte| b"0\"".contains(byte));
        if !is_none && PERMISSIONS.iter().any(|known| name.eq_ignore_ascii_case(known)) {
            let is_public =
                name.eq_ignore_ascii_case(b"public") || found.is_some_and(|found| found.is_public);
            found = Some(Lifetime { is_public });
        }
    }
    found
}

/// What is to be known of a response beside its head.
#[derive(Clone, Copy, Debug, Default)]
pub struct RuledResponse {
    /// The status of the stored response that a 304 is about; `None`: the client has that.
    pub validated: Option<u16>,
    /// The request says who asks, by a cookie or credentials.
    pub is_for_one_client: bool,
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
        if name.is_empty() || !name.iter().all(|byte| is_token(*byte) && *byte != b'*') {
            return Err(FieldRuleError::Name);
        }
        let id = FieldId::from_name(name);
        check(message, change, id, name)?;
        let name = Name { id, text: name.into() };
        if change == FieldChange::Remove {
            self.remove.push(name);
            return Ok(());
        }
        let is_trimmed = value.trim_ascii().len() == value.len() && !value.is_empty();
        if !is_trimmed || !value.iter().copied().all(is_value) {
            return Err(FieldRuleError::Value);
        }
        match (message, id) {
            (RuledMessage::Request, FieldId::Host) if self.host.is_some() => {
                return Err(FieldRuleError::Repeated);
            }
            (RuledMessage::Request, FieldId::Host) if !is_authority(value) => {
                return Err(FieldRuleError::Authority);
            }
            (RuledMessage::Request, FieldId::Host) => {
                self.host = Some(value.into());
                return Ok(());
            }
            (RuledMessage::Request, FieldId::AcceptEncoding) if value != b"identity" => {
                return Err(FieldRuleError::AcceptEncoding);
            }
            _ => {}
        }
        let line = Line::new(name, value);
        let lines = || self.set.iter().chain(&self.add).chain(&self.default);
        if lines().map(Line::bytes).sum::<usize>() + line.bytes() > MOST_BYTES {
            return Err(FieldRuleError::TooMuch);
        }
        let list = match change {
            FieldChange::Set => &mut self.set,
            FieldChange::Default => &mut self.default,
            FieldChange::Add | FieldChange::Remove => &mut self.add,
        };
        if change != FieldChange::Add && list.iter().any(|known| known.name.is(id, &line.name.text)) {
            return Err(FieldRuleError::Repeated);
        }
        list.push(line);
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
    pub fn removes(&self, id: FieldId, name: &[u8]) -> bool {
        self.remove.iter().chain(self.set.iter().map(|line| &line.name)).any(|known| known.is(id, name))
    }

    /// Whether some server takes a field of a request for one that rules are about.
    pub fn is_imitated_by(&self, name: &[u8]) -> bool {
        let lines = self.set.iter().chain(&self.add).chain(&self.default);
        self.remove.iter().chain(lines.map(|line| &line.name)).any(|known| known.is_imitated_by(name))
    }

    /// Appends what is set, what is added and what is missing. `has_kept` says whether a line whose name fits is there.
    pub fn write(&self, has_kept: impl Fn(&dyn Fn(FieldId, &[u8]) -> bool) -> bool, out: &mut Vec<u8>) {
        self.set.iter().chain(&self.add).for_each(|line| line.write(out));
        for line in &self.default {
            if !has_kept(&|id, kept| line.name.is(id, kept)) {
                line.write(out);
            }
        }
    }

    /// Appends the field lines of an upstream's response that go on, and those of the rules; neither status line nor empty
    /// line, and of the framing only `Content-Length`.
    ///
    /// What says how long a response may be reused is not said of errors and of what holds for the moment, nor beside a
    /// cookie that is set, unless it is `public`; as a default, nor where the response or the request says that it is one
    /// client's, nor where the response speaks of its reuse by whatever field.
    ///
    /// What a 304 says takes the place of what is stored (RFC 9111 §3.2): lines are added to those of the same name that it
    /// has, or are there already; nothing is missing in it.
    pub fn write_response(&self, response: &ResponseHead<'_>, of: RuledResponse, out: &mut Vec<u8>) {
        let fields = response.fields;
        let options = ConnectionOptions::of(fields);
        let is_removed =
            |id, name: &[u8]| options.removes(id, name) || self.remove.iter().any(|known| known.is(id, name));
        let left = || fields.iter().filter(|(id, name, _)| !is_removed(*id, name));
        let status = if response.status == 304 { of.validated.unwrap_or(200) } else { response.status };
        let may_be_reused = matches!(status, 200 | 203 | 204 | 206 | 301 | 308);
        let sets_cookie = left().any(|(id, ..)| id == FieldId::SetCookie);
        let is_said = |line: &&Line| match line.lifetime {
            None => true,
            Some(lifetime) => may_be_reused && (lifetime.is_public || !sets_cookie),
        };
        let is_replaced =
            |id, name: &[u8]| self.set.iter().filter(is_said).any(|line| line.name.is(id, name));
        let kept = || left().filter(|(id, name, _)| !is_replaced(*id, name));
        for (id, name, value) in kept() {
            if id != FieldId::TransferEncoding {
                write_field(name, value, out);
            }
        }
        // The upstream chooses by the codings that clients accept, and goes on to do so.
        if fields.lists(FieldId::Vary, b"accept-encoding") && !kept().any(|(id, ..)| id == FieldId::Vary) {
            write_field(b"Vary", b"Accept-Encoding", out);
        }
        let is_there = |name: &Name| kept().any(|(id, kept, _)| name.is(id, kept));
        self.set.iter().filter(is_said).for_each(|line| line.write(out));
        let added = self.add.iter().filter(is_said);
        added.filter(|line| response.status != 304 || is_there(&line.name)).for_each(|line| line.write(out));
        if response.status == 304 {
            return;
        }
        let speaks = kept().any(|(id, name, _)| speaks_of_reuse(id, name));
        let is_said_by_default =
            |lifetime: Lifetime| !speaks && (lifetime.is_public || !of.is_for_one_client);
        for line in self.default.iter().filter(is_said) {
            if line.lifetime.is_none_or(is_said_by_default)
                && !is_replaced(line.name.id, &line.name.text)
                && !is_there(&line.name)
            {
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
        RuledMessage::Redirect if change == FieldChange::Remove => Err(FieldRuleError::NothingToRemove),
        RuledMessage::Redirect if matches!(id, FieldId::Location | FieldId::ContentType) => {
            Err(FieldRuleError::OfRedirect)
        }
        RuledMessage::Response | RuledMessage::Redirect if is_own_of_responses(id) => {
            Err(FieldRuleError::Reserved)
        }
        RuledMessage::Response | RuledMessage::Redirect
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
    use crate::{HeadLimits, Method, ResponseParser};
    use FieldChange::{Add, Default, Remove, Set};
    use RuledMessage::{Redirect, Request, Response};

    fn refused(
        message: RuledMessage,
        change: FieldChange,
        name: &str,
        value: &str,
    ) -> Option<FieldRuleError> {
        FieldRules::default().change(message, change, name, value).err()
    }

    fn rules(changes: &[(FieldChange, &str, &str)]) -> FieldRules {
        let mut rules = FieldRules::default();
        changes
            .iter()
            .for_each(|(change, name, value)| rules.change(Response, *change, name, value).unwrap());
        rules
    }

    /// The field lines of a response with this status line's end and these lines, joined by `|`.
    fn written(rules: &FieldRules, response: &str, of: RuledResponse) -> String {
        let head = format!("HTTP/1.1 {}\r\n\r\n", response.replace('|', "\r\n"));
        let mut parser = ResponseParser::new(HeadLimits::default());
        parser.reset(Method::Get);
        parser.parse(head.as_bytes()).unwrap();
        let mut out = Vec::new();
        rules.write_response(&parser.head(head.as_bytes()), of, &mut out);
        String::from_utf8(out).unwrap().trim_end().replace("\r\n", "|")
    }

    fn of_all(rules: &FieldRules, response: &str) -> String {
        written(rules, response, RuledResponse::default())
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
        assert_eq!(refused(Request, Set, "Host", "[::1]:80"), None);
        for host in ["a b", "a:99999999", "::]["] {
            assert_eq!(refused(Request, Set, "Host", host), Some(FieldRuleError::Authority), "{host}");
        }
        assert_eq!(refused(Redirect, Set, "Location", "/x"), Some(FieldRuleError::OfRedirect));
        assert_eq!(refused(Redirect, Remove, "X-A", ""), Some(FieldRuleError::NothingToRemove));
        assert_eq!(refused(Redirect, Set, "X-A", "1"), None);
        assert_eq!(refused(Request, Set, "Cache_Control", "x"), Some(FieldRuleError::Underscore));
        assert_eq!(refused(Request, Set, "Accept-Encoding", "gzip"), Some(FieldRuleError::AcceptEncoding));
        assert_eq!(refused(Request, Set, "Accept-Encoding", "identity"), None);
    }

    #[test]
    fn a_line_is_one_line_and_there_once() {
        for name in ["", "a b", "a:", "a\r\nb", "ä", "X-*"] {
            assert_eq!(refused(Request, Set, name, "x"), Some(FieldRuleError::Name), "{name:?}");
        }
        for value in ["", " a", "a ", "\t", "a\r\nb: c", "a\nb", "a\0", "\x7f"] {
            assert_eq!(refused(Response, Add, "X-A", value), Some(FieldRuleError::Value), "{value:?}");
        }
        let mut rules = rules(&[(Set, "X-A", "1"), (Add, "Link", "</a>"), (Add, "link", "</b>")]);
        assert_eq!(rules.change(Response, Set, "x-a", "2"), Err(FieldRuleError::Repeated));
        assert_eq!(rules.change(Response, Set, "X-B", &"x".repeat(MOST_BYTES)), Err(FieldRuleError::TooMuch));
    }

    #[test]
    fn lines_are_left_out_replaced_added_and_completed() {
        let rules = rules(&[
            (Remove, "Server", ""),
            (Set, "X-A", "set"),
            (Add, "X-B", "added"),
            (Default, "X-C", "default"),
            (Default, "X-D", "default"),
            (Default, "X-E", "default"),
        ]);
        let response = "200 OK|server: a|x-a: 1|X-A: 2|X-B: 1|x-c: 1|x_d: 1|X-E: 1|Connection: x-e";
        assert_eq!(
            of_all(&rules, response),
            "X-B: 1|x-c: 1|x_d: 1|X-A: set|X-B: added|X-D: default|X-E: default"
        );
        // What is missing there, or added to what it does not have, is nothing in a 304.
        assert_eq!(of_all(&rules, "304 Not Modified|X-Z: 1"), "X-Z: 1|X-A: set");
        assert_eq!(of_all(&rules, "304 Not Modified|X-B: 1"), "X-B: 1|X-A: set|X-B: added");
    }

    #[test]
    fn a_request_cannot_imitate_what_rules_are_about() {
        let mut rules = FieldRules::default();
        rules.change(Request, Set, "X-User", "nobody").unwrap();
        rules.change(Request, Default, "X-Role", "guest").unwrap();
        for name in ["x_user", "X.User", "X-User", "X~ROLE", "X_Role", "X-Users"] {
            let is_other = matches!(name, "X-User" | "X-Users");
            assert_eq!(rules.is_imitated_by(name.as_bytes()), !is_other, "{name}");
        }
        assert!(rules.removes(FieldId::Other, b"x-user") && !rules.removes(FieldId::Other, b"X-Role"));
    }

    #[test]
    fn a_lifetime_is_not_said_of_what_is_for_the_moment_or_for_one_client() {
        let set = rules(&[(Set, "Cache-Control", "max-age=600, immutable")]);
        let lasting = "Cache-Control: max-age=600, immutable";
        for status in ["200 OK", "301 Moved", "308 Moved", "304 Not Modified"] {
            assert_eq!(of_all(&set, status), lasting, "{status}");
        }
        for status in ["302 Found", "307 Found", "404 None", "500 Error"] {
            assert_eq!(of_all(&set, &format!("{status}|Cache-Control: no-cache")), "Cache-Control: no-cache");
        }
        assert_eq!(of_all(&set, "200 OK|Set-Cookie: a=b"), "Set-Cookie: a=b");
        let validating = |validated| RuledResponse { validated: Some(validated), ..RuledResponse::default() };
        assert_eq!(written(&set, "304 Not Modified", validating(404)), "");
        assert_eq!(written(&set, "304 Not Modified", validating(200)), lasting);
        let public = rules(&[(Set, "Cache-Control", "public, max-age=600")]);
        assert_eq!(
            of_all(&public, "200 OK|Set-Cookie: a=b"),
            "Set-Cookie: a=b|Cache-Control: public, max-age=600"
        );
        for restriction in ["no-store", "private", "no-cache, must-revalidate", "max-age=0"] {
            let rules = rules(&[(Set, "Cache-Control", restriction)]);
            let said = format!("Cache-Control: {restriction}");
            assert_eq!(of_all(&rules, "404 None|Cache-Control: max-age=3600"), said);
        }
        let both = rules(&[(Set, "Cache-Control", "private, max-age=600")]);
        assert_eq!(of_all(&both, "404 None|X-A: 1"), "X-A: 1");
    }

    #[test]
    fn a_default_lifetime_stands_only_where_nothing_speaks_against_it() {
        let rules = rules(&[(Default, "CDN-Cache-Control", "max-age=60"), (Default, "X-A", "1")]);
        assert_eq!(of_all(&rules, "200 OK"), "CDN-Cache-Control: max-age=60|X-A: 1");
        for line in [
            "Cache-Control: private",
            "Cache-Control: max-age=5",
            "Expires: 0",
            "Pragma: no-cache",
            "Surrogate-Control: no-store",
            "Example-Cache-Control: no-store",
            "Set-Cookie: a=b",
        ] {
            assert_eq!(of_all(&rules, &format!("200 OK|{line}")), format!("{line}|X-A: 1"));
        }
        let of = RuledResponse { is_for_one_client: true, ..RuledResponse::default() };
        assert_eq!(written(&rules, "200 OK", of), "X-A: 1");
    }

    #[test]
    fn who_compresses_says_so() {
        let rules = rules(&[(Set, "Vary", "X-Tier")]);
        let response = "200 OK|Vary: Accept-Encoding, Origin";
        assert_eq!(of_all(&rules, response), "Vary: Accept-Encoding|Vary: X-Tier");
        assert_eq!(of_all(&rules, "200 OK|Vary: Origin"), "Vary: X-Tier");
    }
}
