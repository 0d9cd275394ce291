//! One stream: a request and its response as frames (RFC 9114 §4.1).

use std::cell::Cell;
use std::rc::Rc;
use std::task::Waker;

use quinn::{RecvStream, SendStream};
use tidegate_http::http3::ErrorCode;

use crate::http3::connection::Connection;
use crate::http3::request::Content;
use crate::http3::response::Answer;
use crate::streams::{self, Ended, Fault, Shared};

/// What both halves of a stream know.
#[derive(Default)]
pub(super) struct Both {
    /// What is wrong with the request.
    pub fault: Cell<Option<ErrorCode>>,
    /// Of whoever answers it.
    pub waker: Cell<Option<Waker>>,
}

/// Answers the request on a stream.
pub(super) fn begin(shared: &Rc<Shared>, connection: &Rc<Connection>, send: SendStream, receive: RecvStream) {
    let both = Rc::new(Both::default());
    let answer = Answer::new(connection, &both, send);
    let limits = shared.core.with_plan(|plan| plan.limits);
    let content = Content::new(connection, &both, receive, limits.head);
    let request = async move {
        match tokio::time::timeout(limits.header_timeout, content.request()).await {
            Ok(request) => request,
            Err(_) => Err(Ended::Failed(Fault::Incomplete)),
        }
    };
    streams::begin(shared, request, answer);
}
