//! One core's view of a service: its connections, what it says of itself, and how it has failed.

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tidegate_http::normalize::Normalized;
use tidegate_icap::{Method, Options, Request, ResponseHead};
use tokio::time::Instant;

use crate::icap::link::{Heard, Link};
use crate::icap::{Failure, Reviewed, ServiceTag, concerns};
use crate::settings::{IcapService, IcapSubject};
use crate::upstream::{self, Permit, Permits, Stream, UpstreamError, send_all};

/// Failures in a row after which a service is not asked for a while.
const MAX_FAILURES: u32 = 3;
/// For how long.
const OUT: Duration = Duration::from_secs(10);
/// How long a connection without a message is kept.
const IDLE: Duration = Duration::from_secs(30);

/// A core's services.
#[derive(Default)]
pub(crate) struct Services {
    all: Vec<Rc<Service>>,
    folds_case: bool,
}

/// One service.
pub(crate) struct Service {
    pub settings: IcapService,
    /// `HOST:PORT`.
    pub host: String,
    /// Data cores, which share the connections that the service takes.
    workers: usize,
    permits: Rc<Permits>,
    /// The most recently used last.
    idle: RefCell<Vec<(Stream, Instant)>>,
    known: RefCell<Option<Known>>,
    /// The state that it is in, for all cores.
    tag: Arc<ServiceTag>,
    /// Who asks for the options; the others wait for the answer.
    asking: tokio::sync::Mutex<()>,
    failures: Cell<u32>,
    out_until: Cell<Option<Instant>>,
}

/// What a service says of itself.
struct Known {
    options: Rc<Options>,
    /// The state in which it said so.
    reviewed: Reviewed,
    until: Instant,
}

/// The right to one connection to a service, until it is dropped.
pub(crate) struct Lease {
    service: Rc<Service>,
    _permit: Permit,
}

impl Services {
    pub(crate) fn new(settings: &[(IcapService, Arc<ServiceTag>)], folds_case: bool, workers: usize) -> Self {
        let service = |(settings, tag): &(IcapService, Arc<ServiceTag>)| {
            Rc::new(Service {
                settings: settings.clone(),
                host: settings.host(),
                workers,
                permits: Rc::default(),
                idle: RefCell::default(),
                known: RefCell::default(),
                tag: Arc::clone(tag),
                asking: tokio::sync::Mutex::default(),
                failures: Cell::default(),
                out_until: Cell::default(),
            })
        };
        Self { all: settings.iter().map(service).collect(), folds_case }
    }

    /// The first service that looks at such messages.
    pub(crate) fn find(
        &self,
        on: IcapSubject,
        method: &[u8],
        normalized: &Normalized<'_>,
    ) -> Option<Rc<Service>> {
        let concerns =
            |service: &&Rc<Service>| concerns(&service.settings, on, method, normalized, self.folds_case);
        self.all.iter().find(concerns).cloned()
    }

    /// Closes the connections that were idle for too long. Services that look at responses are asked about themselves
    /// as soon as that is due: nobody else would find out that what is in the cache is outdated.
    pub(crate) fn sweep(&self) {
        for service in &self.all {
            service.idle.borrow_mut().retain(|(_, since)| since.elapsed() <= IDLE);
            let is_due = service.valid_options().is_none() && !service.is_out();
            if service.settings.on == IcapSubject::Responses && is_due && service.asking.try_lock().is_ok() {
                let service = Rc::clone(service);
                tokio::task::spawn_local(async move {
                    match service.options().await {
                        Ok(_) => {}
                        Err(failure) => service.failed(&failure),
                    }
                });
            }
        }
    }
}

impl Service {
    /// A place among the messages that the service looks at; waits for one if that takes less than the timeout.
    pub(crate) async fn lease(self: &Rc<Self>, client: IpAddr) -> Result<Lease, Failure> {
        let most = match self.known.borrow().as_ref().and_then(|known| known.options.max_connections) {
            Some(most) => self.settings.connections.min((most / self.workers).max(1)),
            None => self.settings.connections,
        };
        let permit = match self.permits.take(most, Some(client)) {
            Some(permit) => permit,
            None => {
                let waited = self.permits.wait(Some(client), 0, self.settings.timeout).await;
                waited.map_err(|_| Failure::Busy)?
            }
        };
        Ok(Lease { service: Rc::clone(self), _permit: permit })
    }

    /// What the service says of itself, unless it is out; asked again when that is no longer to be relied on (RFC 3507
    /// §4.10).
    pub(crate) async fn options(&self) -> Result<(Rc<Options>, Reviewed), Failure> {
        if self.is_out() {
            return Err(Failure::Down);
        }
        if let Some(valid) = self.valid_options() {
            return Ok(valid);
        }
        let _asking = self.asking.lock().await;
        if let Some(valid) = self.valid_options() {
            return Ok(valid);
        }
        if self.is_out() {
            return Err(Failure::Down);
        }
        let head = self.ask_options().await?;
        let (options, reviewed) = (Rc::new(head.options), self.tag.heard(head.service_tag.as_deref()));
        let until = Instant::now() + options.life();
        *self.known.borrow_mut() = Some(Known { options: Rc::clone(&options), reviewed, until });
        Ok((options, reviewed))
    }

    fn is_out(&self) -> bool {
        self.out_until.get().is_some_and(|until| Instant::now() < until)
    }

    /// What it said, unless its time is over, or the service is in another state by now.
    fn valid_options(&self) -> Option<(Rc<Options>, Reviewed)> {
        let known = self.known.borrow();
        let Known { options, reviewed, until } = known.as_ref()?;
        let is_valid = Instant::now() < *until && !self.tag.outdates(*reviewed);
        is_valid.then(|| (Rc::clone(options), *reviewed))
    }

    async fn ask_options(&self) -> Result<ResponseHead, Failure> {
        let mut out = Vec::with_capacity(256);
        let request = Request {
            method: Method::Options,
            service: &self.settings.url,
            host: &self.host,
            client: None,
            allow_204: true,
            preview_bytes: None,
            http_request: b"",
            http_response: None,
            has_body: false,
        };
        request.write(&mut out);
        let timeout = self.settings.timeout;
        let exchange = async {
            let stream = self.connect().await?;
            send_all(&stream, &out, timeout).await.map_err(Failure::Connection)?;
            let mut link = Link::new(stream, None, timeout);
            match link.hear().await? {
                Heard::Head(head) if head.status == 200 => Ok(head),
                Heard::Head(head) => Err(Failure::Status(head.status)),
                _ => Err(Failure::Message),
            }
        };
        let answered = tokio::time::timeout(timeout, exchange).await;
        answered.unwrap_or(Err(Failure::Connection(UpstreamError::ResponseTimeout)))
    }

    /// A connection that is idle, if there is one: it may turn out to be dead.
    pub(crate) fn take_idle(&self) -> Option<Stream> {
        let mut idle = self.idle.borrow_mut();
        while let Some((stream, since)) = idle.pop() {
            // Nothing may have come, not even an end.
            if since.elapsed() <= IDLE && matches!(stream.listen(), upstream::Heard::Silence) {
                return Some(stream);
            }
        }
        None
    }

    pub(crate) async fn connect(&self) -> Result<Stream, Failure> {
        let address = self.settings.address.into();
        let attempt = tokio::time::timeout(self.settings.timeout, Stream::connect(&address, None)).await;
        let stream = attempt.map_err(|_| Failure::Connection(UpstreamError::ConnectTimeout))?;
        stream.map_err(|error| Failure::Connection(UpstreamError::Connect(error)))
    }

    pub(crate) fn succeeded(&self) {
        self.failures.set(0);
        self.out_until.set(None);
    }

    pub(crate) fn failed(&self, failure: &Failure) {
        if failure.is_busy() || matches!(failure, Failure::Down) {
            // As often as there are requests, until the service is in again.
            tracing::debug!(service = %self.settings.url, %failure, "an ICAP service was not asked");
            return;
        }
        tracing::warn!(service = %self.settings.url, %failure, "an ICAP service did not decide");
        // What it says of itself may have changed.
        self.known.take();
        self.failures.set(self.failures.get().saturating_add(1));
        if self.failures.get() >= MAX_FAILURES {
            // One failure more takes it out again; one success brings it back for good.
            self.out_until.set(Some(Instant::now() + OUT));
        }
    }
}

impl Lease {
    /// The service has answered, in the state that `tag` names.
    pub(crate) fn heard(&self, tag: Option<&[u8]>) -> Reviewed {
        self.service.tag.heard(tag)
    }

    /// Keeps a connection for the next message.
    pub(crate) fn give_back(&self, stream: Stream) {
        let mut idle = self.service.idle.borrow_mut();
        if idle.len() < self.service.settings.connections {
            idle.push((stream, Instant::now()));
        }
    }
}
