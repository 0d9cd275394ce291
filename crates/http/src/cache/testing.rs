//! Heads made of literals, for tests.

use crate::field::{Field, FieldId, Fields, Span};
use crate::head::{BodyFraming, Method, RequestHead, ResponseHead, Version};

/// Field lines that own their bytes.
pub(crate) struct OwnedFields {
    buffer: Vec<u8>,
    fields: Vec<Field>,
    present: u128,
}

impl OwnedFields {
    pub(crate) fn new<N: AsRef<[u8]>, V: AsRef<[u8]>>(lines: &[(N, V)]) -> Self {
        let mut this = Self { buffer: Vec::new(), fields: Vec::new(), present: 0 };
        for (name, value) in lines {
            let id = FieldId::from_name(name.as_ref());
            let (name, value) = (this.push(name.as_ref()), this.push(value.as_ref()));
            this.present |= 1 << id as u8;
            this.fields.push(Field { id, name, value });
        }
        this
    }

    fn push(&mut self, bytes: &[u8]) -> Span {
        let start = self.buffer.len() as u32;
        self.buffer.extend_from_slice(bytes);
        Span { start, length: bytes.len() as u32 }
    }

    pub(crate) fn view(&self) -> Fields<'_> {
        Fields::new(&self.buffer, &self.fields, self.present)
    }
}

pub(crate) fn request<'a>(method: Method, target: &'a [u8], fields: &'a OwnedFields) -> RequestHead<'a> {
    RequestHead {
        method,
        method_bytes: b"",
        target,
        version: Version::Http11,
        fields: fields.view(),
        framing: BodyFraming::None,
        keep_alive: true,
        expect_continue: false,
        upgrade: false,
    }
}

pub(crate) fn response(status: u16, fields: &OwnedFields) -> ResponseHead<'_> {
    ResponseHead {
        status,
        reason: b"",
        version: Version::Http11,
        fields: fields.view(),
        framing: BodyFraming::Length(5),
        keep_alive: true,
    }
}
