//! One stream: a request and its response as frames (RFC 9114 §4.1).

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use quinn::{RecvStream, SendStream};
use tidegate_http::http3::ErrorCode;

use crate::http3::connection::Connection;
use crate::http3::request::Content;
use crate::http3::response::Answer;
use crate::streams::{self, Ended, Fault, Shared};

/// What both halves of a stream know.
#[derive(Default)]
pub(super) struct Both {
    /// What is wrong with the request, or that its client has broken it off.
    fault: Cell<Option<ErrorCode>>,
    /// Of whoever answers it.
    waker: Cell<Option<Waker>>,
}

impl Both {
    /// There is to be no response, and why; its waker is left until there is a reason.
    pub(super) fn poll_fault(&self, context: &Context<'_>) -> Poll<ErrorCode> {
        if let Some(fault) = self.fault.get() {
            return Poll::Ready(fault);
        }
        self.waker.set(Some(context.waker().clone()));
        Poll::Pending
    }

    pub(super) fn fault(&self) -> Option<ErrorCode> {
        self.fault.get()
    }

    pub(super) fn fail(&self, fault: ErrorCode) {
        self.fault.set(Some(fault));
        self.waker.take().iter().for_each(Waker::wake_by_ref);
    }
}

/// Answers the request on a stream.
pub(super) fn begin(shared: &Rc<Shared>, connection: &Rc<Connection>, send: SendStream, receive: RecvStream) {
    let both = Rc::new(Both::default());
    let answer = Answer::new(connection, &both, send);
    let limits = shared.core.with_plan(|plan| plan.limits);
    let content = Content::new(shared, connection, &both, receive, limits.head);
    let request = async move {
        match tokio::time::timeout(limits.header_timeout, content.request()).await {
            Ok(request) => request,
            Err(_) => Err(Ended::Failed(Fault::Incomplete)),
        }
    };
    streams::begin(shared, request, answer);
}
