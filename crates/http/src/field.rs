//! Header fields as views into the bytes they were parsed from.

/// A range of bytes within the buffer a head was parsed from.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Span {
    /// Offset of the first byte.
    pub start: u32,
    /// Number of bytes.
    pub length: u32,
}

impl Span {
    /// The bytes of `buffer` that this span covers; empty if the span lies outside.
    #[inline]
    pub fn of(self, buffer: &[u8]) -> &[u8] {
        buffer.get(self.start as usize..self.start as usize + self.length as usize).unwrap_or(b"")
    }
}

/// One field line: where its name and value lie, and which known field it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Field {
    /// Which known field, or [`FieldId::Other`].
    pub id: FieldId,
    /// The name as received.
    pub name: Span,
    /// The value without leading and trailing whitespace.
    pub value: Span,
}

macro_rules! known_fields {
    ($($id:ident = $name:literal,)*) => {
        /// A header field recognized while parsing.
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[repr(u8)]
        pub enum FieldId {
            $(#[doc = concat!("`", $name, "`")] $id,)*
            /// Any other field.
            Other,
        }

        impl FieldId {
            /// Every known field with its name in lower case.
            pub const KNOWN: &'static [(FieldId, &'static str)] = &[$((FieldId::$id, $name),)*];

            /// The name in lower case; empty for [`FieldId::Other`].
            pub const fn name(self) -> &'static str {
                match self { $(Self::$id => $name,)* Self::Other => "" }
            }
        }
    };
}

known_fields! {
    Accept = "accept",
    AcceptCharset = "accept-charset",
    AcceptEncoding = "accept-encoding",
    AcceptLanguage = "accept-language",
    AcceptRanges = "accept-ranges",
    AccessControlAllowOrigin = "access-control-allow-origin",
    Age = "age",
    Allow = "allow",
    AltSvc = "alt-svc",
    Authorization = "authorization",
    CacheControl = "cache-control",
    CacheStatus = "cache-status",
    CacheTag = "cache-tag",
    CdnCacheControl = "cdn-cache-control",
    Connection = "connection",
    ContentDisposition = "content-disposition",
    ContentEncoding = "content-encoding",
    ContentLanguage = "content-language",
    ContentLength = "content-length",
    ContentLocation = "content-location",
    ContentRange = "content-range",
    ContentSecurityPolicy = "content-security-policy",
    ContentType = "content-type",
    Cookie = "cookie",
    Date = "date",
    Etag = "etag",
    Expect = "expect",
    Expires = "expires",
    Forwarded = "forwarded",
    Host = "host",
    IfMatch = "if-match",
    IfModifiedSince = "if-modified-since",
    IfNoneMatch = "if-none-match",
    IfRange = "if-range",
    IfUnmodifiedSince = "if-unmodified-since",
    KeepAlive = "keep-alive",
    LastModified = "last-modified",
    Location = "location",
    MaxForwards = "max-forwards",
    Origin = "origin",
    Pragma = "pragma",
    ProxyAuthenticate = "proxy-authenticate",
    ProxyAuthorization = "proxy-authorization",
    ProxyConnection = "proxy-connection",
    Range = "range",
    Referer = "referer",
    RetryAfter = "retry-after",
    SecFetchDest = "sec-fetch-dest",
    SecFetchMode = "sec-fetch-mode",
    SecFetchSite = "sec-fetch-site",
    SecFetchUser = "sec-fetch-user",
    Server = "server",
    SetCookie = "set-cookie",
    StrictTransportSecurity = "strict-transport-security",
    SurrogateControl = "surrogate-control",
    SurrogateKey = "surrogate-key",
    Te = "te",
    Trailer = "trailer",
    TransferEncoding = "transfer-encoding",
    Upgrade = "upgrade",
    UpgradeInsecureRequests = "upgrade-insecure-requests",
    UserAgent = "user-agent",
    Vary = "vary",
    Via = "via",
    Warning = "warning",
    WwwAuthenticate = "www-authenticate",
    XForwardedFor = "x-forwarded-for",
    XForwardedHost = "x-forwarded-host",
    XForwardedProto = "x-forwarded-proto",
    XRealIp = "x-real-ip",
}

/// Some of the known fields, to be looked for at once.
#[derive(Clone, Copy, Debug)]
pub struct FieldSet(u128);

impl FieldSet {
    /// The set of these.
    pub const fn of(ids: &[FieldId]) -> Self {
        let (mut bits, mut i) = (0, 0);
        while i < ids.len() {
            bits |= 1 << ids[i] as u8;
            i += 1;
        }
        Self(bits)
    }
}

/// The field lines of one head in the order received.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    buffer: &'a [u8],
    fields: &'a [Field],
    /// Bit `id as u8` is set when a field with that id is present.
    present: u128,
}

impl<'a> Fields<'a> {
    /// A view of `fields`, whose spans lie in `buffer`; bit `id as u8` of `present` says that a field is there.
    pub fn new(buffer: &'a [u8], fields: &'a [Field], present: u128) -> Self {
        Self { buffer, fields, present }
    }

    /// Whether a known field is present.
    #[inline]
    pub fn has(&self, id: FieldId) -> bool {
        self.present & (1 << id as u8) != 0
    }

    /// Whether any of some known fields is present.
    #[inline]
    pub fn has_any(&self, ids: FieldSet) -> bool {
        self.present & ids.0 != 0
    }

    /// The value of the first field with this id.
    #[inline]
    pub fn get(&self, id: FieldId) -> Option<&'a [u8]> {
        if !self.has(id) {
            return None;
        }
        self.fields.iter().find(|field| field.id == id).map(|field| field.value.of(self.buffer))
    }

    /// The values of all fields with this id, in order.
    pub fn get_all(&self, id: FieldId) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let buffer = self.buffer;
        let fields = if self.has(id) { self.fields } else { &[] };
        fields.iter().filter(move |field| field.id == id).map(move |field| field.value.of(buffer))
    }

    /// Whether `member`, in any case, is one of a list that fields with this id make (RFC 9110 §5.6.1).
    pub fn lists(&self, id: FieldId, member: &[u8]) -> bool {
        let mut members = self.get_all(id).flat_map(|value| value.split(|&byte| byte == b','));
        members.any(|listed| listed.trim_ascii().eq_ignore_ascii_case(member))
    }

    /// The values of all fields with this name (any case), known or not.
    pub fn named<'n>(&self, name: &'n [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a, 'n> {
        let buffer = self.buffer;
        self.fields
            .iter()
            .filter(move |field| field.name.of(buffer).eq_ignore_ascii_case(name))
            .map(move |field| field.value.of(buffer))
    }

    /// Every field line: id, name as received, value.
    pub fn iter(&self) -> FieldsIter<'a> {
        FieldsIter { buffer: self.buffer, fields: self.fields.iter() }
    }

    /// Number of field lines.
    pub fn len(&self) -> usize {
        self.fields.len()
    }

    /// Whether there is no field line.
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }
}

/// Iterator over field lines: id, name as received, value.
#[derive(Clone, Debug)]
pub struct FieldsIter<'a> {
    buffer: &'a [u8],
    fields: std::slice::Iter<'a, Field>,
}

impl<'a> Iterator for FieldsIter<'a> {
    type Item = (FieldId, &'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let field = self.fields.next()?;
        Some((field.id, field.name.of(self.buffer), field.value.of(self.buffer)))
    }
}
