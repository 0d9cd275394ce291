//! Dictionaries of structured fields (RFC 9651 §4.2.2), as far as cache directives need them.

/// The value of a dictionary member; only kinds that a cache directive can have are told apart.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Item {
    Integer(i64),
    Boolean(bool),
    /// Valid, but of a kind that no directive which is understood here has.
    Other,
}

/// Calls `each` with every member of the dictionary in `value`, parameters left out.
///
/// `None` if the value is no dictionary: the caller must forget the members it was told (RFC 9651 §4.2: a field that
/// fails to parse is ignored as a whole).
pub(super) fn dictionary<'a>(value: &'a [u8], mut each: impl FnMut(&'a [u8], Item)) -> Option<()> {
    let mut parser = Parser { rest: value };
    parser.skip_spaces();
    while !parser.rest.is_empty() {
        let key = parser.key()?;
        let item = match parser.take(b'=') {
            true if parser.peek() == Some(b'(') => parser.inner_list()?,
            true => parser.bare_item()?,
            false => Item::Boolean(true),
        };
        parser.parameters()?;
        each(key, item);
        parser.skip_optional_whitespace();
        if parser.rest.is_empty() {
            break;
        }
        if !parser.take(b',') {
            return None;
        }
        parser.skip_optional_whitespace();
        // A trailing comma is an error.
        parser.peek()?;
    }
    Some(())
}

struct Parser<'a> {
    rest: &'a [u8],
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    fn take(&mut self, byte: u8) -> bool {
        match self.rest.split_first() {
            Some((&first, rest)) if first == byte => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    fn next(&mut self) -> Option<u8> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    fn take_while(&mut self, accept: impl Fn(u8) -> bool) -> &'a [u8] {
        let length = self.rest.iter().position(|&byte| !accept(byte)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(length);
        self.rest = rest;
        taken
    }

    fn skip_spaces(&mut self) {
        self.take_while(|byte| byte == b' ');
    }

    fn skip_optional_whitespace(&mut self) {
        self.take_while(|byte| matches!(byte, b' ' | b'\t'));
    }

    fn key(&mut self) -> Option<&'a [u8]> {
        if !matches!(self.peek()?, b'a'..=b'z' | b'*') {
            return None;
        }
        Some(self.take_while(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'*')))
    }

    fn parameters(&mut self) -> Option<()> {
        while self.take(b';') {
            self.skip_spaces();
            self.key()?;
            if self.take(b'=') {
                self.bare_item()?;
            }
        }
        Some(())
    }

    fn inner_list(&mut self) -> Option<Item> {
        self.take(b'(');
        loop {
            self.skip_spaces();
            if self.take(b')') {
                return Some(Item::Other);
            }
            self.bare_item()?;
            self.parameters()?;
            if !matches!(self.peek()?, b' ' | b')') {
                return None;
            }
        }
    }

    fn bare_item(&mut self) -> Option<Item> {
        match self.peek()? {
            b'-' | b'0'..=b'9' => self.number(),
            b'"' => self.string(),
            b'?' => {
                self.next();
                match self.next()? {
                    b'0' => Some(Item::Boolean(false)),
                    b'1' => Some(Item::Boolean(true)),
                    _ => None,
                }
            }
            b':' => {
                self.next();
                self.take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'='));
                self.take(b':').then_some(Item::Other)
            }
            b'@' => {
                self.next();
                matches!(self.number()?, Item::Integer(_)).then_some(Item::Other)
            }
            b'%' => {
                self.next();
                self.display_string()
            }
            first if first.is_ascii_alphabetic() || first == b'*' => {
                self.take_while(|byte| crate::chars::is_token(byte) || matches!(byte, b':' | b'/'));
                Some(Item::Other)
            }
            _ => None,
        }
    }

    fn number(&mut self) -> Option<Item> {
        let negative = self.take(b'-');
        let digits = self.take_while(|byte| byte.is_ascii_digit());
        if digits.is_empty() || digits.len() > 15 {
            return None;
        }
        if self.take(b'.') {
            let fraction = self.take_while(|byte| byte.is_ascii_digit());
            return (digits.len() <= 12 && (1..=3).contains(&fraction.len())).then_some(Item::Other);
        }
        let magnitude = digits.iter().fold(0, |number, digit| number * 10 + i64::from(digit - b'0'));
        Some(Item::Integer(if negative { -magnitude } else { magnitude }))
    }

    fn string(&mut self) -> Option<Item> {
        self.next();
        loop {
            match self.next()? {
                b'"' => return Some(Item::Other),
                b'\\' if !matches!(self.next()?, b'"' | b'\\') => return None,
                b'\\' | b' '..=b'~' => {}
                _ => return None,
            }
        }
    }

    fn display_string(&mut self) -> Option<Item> {
        if !self.take(b'"') {
            return None;
        }
        loop {
            match self.next()? {
                b'"' => return Some(Item::Other),
                b'%' => {
                    for _ in 0..2 {
                        if !matches!(self.next()?, b'0'..=b'9' | b'a'..=b'f') {
                            return None;
                        }
                    }
                }
                b' '..=b'~' => {}
                _ => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(value: &str) -> Option<Vec<(&str, Item)>> {
        let mut members = Vec::new();
        dictionary(value.as_bytes(), |key, item| members.push((std::str::from_utf8(key).unwrap(), item)))?;
        Some(members)
    }

    #[test]
    fn every_kind_of_member_is_read() {
        assert_eq!(parse(""), Some(vec![]));
        assert_eq!(
            parse("max-age=60;x=\"a, b\", no-store\t,b=?0, n=-12"),
            Some(vec![
                ("max-age", Item::Integer(60)),
                ("no-store", Item::Boolean(true)),
                ("b", Item::Boolean(false)),
                ("n", Item::Integer(-12)),
            ])
        );
        for other in
            ["1.5", "\"a\\\"b\"", "token/x:y", ":aGk=:", "(a \"b\";c 1);d", "()", "@1659578233", "%\"a%20b\""]
        {
            let text = format!("a={other}, b=1");
            assert_eq!(parse(&text), Some(vec![("a", Item::Other), ("b", Item::Integer(1))]), "{text}");
        }
    }

    #[test]
    fn one_error_spoils_the_whole() {
        for wrong in [
            ",",
            "a,",
            "a,,b",
            "Max-Age=1",
            "a=",
            "a =1",
            "a= 1",
            "a=1 b",
            "a=\"x",
            "a=1.",
            "a=1.2345",
            "a=(1",
            "a=(1,2)",
            "a=?2",
            "a=:x",
            "a='1'",
            "a=@1.5",
            "a=%x",
            "a;B",
            "a=1234567890123456",
            "a=%\"%2\"",
            "\ta",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(value in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = dictionary(&value, |_, _| {});
        }

        #[test]
        fn no_text_makes_it_panic(value in "[a-z0-9=;,()?:@%\"\\\\ .*-]{0,40}") {
            let _ = dictionary(value.as_bytes(), |_, _| {});
        }
    }
}
