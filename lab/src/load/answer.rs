//! Counts the answers in what a server sends, wherever the bytes are split.

/// Bytes that a response head may have; more means that something else than HTTP is sent.
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// Where a connection is within the answers that it reads.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// The start of a head that has not come whole yet.
    head: Vec<u8>,
    /// Bytes of the current body that have not come yet.
    body_left: u64,
}

/// Why what came is no answer to count.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum AnswerError {
    #[error("not an HTTP/1 response")]
    Malformed,
    #[error("status {0}")]
    Status(u16),
    #[error("no Content-Length")]
    Unframed,
}

impl Answers {
    /// Takes what came; the number of answers that are whole with it.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> Result<u64, AnswerError> {
        let mut whole = 0;
        while !bytes.is_empty() {
            if self.body_left > 0 {
                let step = bytes.len().min(usize::try_from(self.body_left).unwrap_or(usize::MAX));
                self.body_left -= step as u64;
                bytes = &bytes[step..];
                whole += u64::from(self.body_left == 0);
                continue;
            }
            let buffered = self.head.len();
            let (length, body) = if buffered == 0 {
                match head(bytes)? {
                    Some(found) => found,
                    None => {
                        self.head.extend_from_slice(bytes);
                        return Ok(whole);
                    }
                }
            } else {
                self.head.extend_from_slice(bytes);
                match head(&self.head)? {
                    Some(found) => found,
                    None => return Ok(whole),
                }
            };
            self.head.clear();
            bytes = &bytes[length - buffered..];
            self.body_left = body;
            whole += u64::from(body == 0);
        }
        Ok(whole)
    }
}

/// Length of the head and of the body after it; `None` while the head is not whole.
fn head(bytes: &[u8]) -> Result<Option<(usize, u64)>, AnswerError> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut fields);
    let length = match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD_BYTES => return Ok(None),
        _ => return Err(AnswerError::Malformed),
    };
    if response.code != Some(200) {
        return Err(AnswerError::Status(response.code.unwrap_or(0)));
    }
    let body = response
        .headers
        .iter()
        .find(|field| field.name.eq_ignore_ascii_case("content-length"))
        .and_then(|field| std::str::from_utf8(field.value).ok()?.parse().ok())
        .ok_or(AnswerError::Unframed)?;
    Ok(Some((length, body)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &[u8] =
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

    #[test]
    fn answers_split_at_any_byte_are_all_counted() {
        for at in 0..TWO.len() {
            let mut answers = Answers::default();
            let whole = answers.take(&TWO[..at]).unwrap() + answers.take(&TWO[at..]).unwrap();
            assert_eq!(whole, 2, "split at {at}");
        }
    }

    #[test]
    fn answers_byte_by_byte_are_all_counted() {
        let mut answers = Answers::default();
        let whole: u64 = TWO.iter().map(|byte| answers.take(&[*byte]).unwrap()).sum();
        assert_eq!(whole, 2);
    }

    #[test]
    fn other_answers_than_200_are_refused() {
        let busy = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(Answers::default().take(busy), Err(AnswerError::Status(503)));
        assert_eq!(Answers::default().take(b"HTTP/1.1 200 OK\r\n\r\n"), Err(AnswerError::Unframed));
        assert_eq!(Answers::default().take(b"SSH-2.0-OpenSSH\r\n"), Err(AnswerError::Malformed));
    }

    #[test]
    fn a_head_without_end_is_refused() {
        let mut answers = Answers::default();
        answers.take(b"HTTP/1.1 200 OK\r\nX: ").unwrap();
        assert_eq!(answers.take(&[b'a'; MAX_HEAD_BYTES]), Err(AnswerError::Malformed));
    }
}
