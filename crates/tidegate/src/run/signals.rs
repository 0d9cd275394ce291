//! What signals do to a process that serves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate_accelerator::Engine;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Reloader;
use crate::notify;
use crate::upgrade::Upgrader;

/// A second signal to end that comes sooner than this is taken for the first one: a terminal and a script send both.
const SECOND_SIGNAL_AFTER: Duration = Duration::from_secs(1);

/// Registers for the signals that end a program; the future is ready when one has come.
pub(crate) fn end_signal() -> std::io::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// The signals that mean something. Registered before anything listens, so that whoever sees the port open can send
/// one.
pub(super) struct Signals {
    runtime: tokio::runtime::Runtime,
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    reopen: Signal,
    upgrade: Signal,
}

impl Signals {
    pub(super) fn register() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let guard = runtime.enter();
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        let hangup = signal(SignalKind::hangup())?;
        let reopen = signal(SignalKind::user_defined1())?;
        let upgrade = signal(SignalKind::user_defined2())?;
        drop(guard);
        Ok(Self { runtime, terminate, interrupt, hangup, reopen, upgrade })
    }

    /// Until clients are served, SIGTERM and SIGINT end the program at once: a start may wait for servers, and a large
    /// cache takes long to prepare. The other signals wait.
    pub(super) fn end_the_start(self) -> std::io::Result<Starting> {
        let Self { runtime, mut terminate, mut interrupt, hangup, reopen, upgrade } = self;
        let (serving, is_serving) = tokio::sync::oneshot::channel();
        let thread = std::thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    _ = is_serving => return,
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                notify::stopping();
                tracing::info!("stopped before any client was served");
                std::process::exit(0);
            });
            Self { runtime, terminate, interrupt, hangup, reopen, upgrade }
        })?;
        Ok(Starting { serving, thread })
    }

    /// SIGTERM and SIGINT drain, a second one ends at once; SIGHUP reads the configuration again and opens the logs
    /// anew; SIGUSR1 does only the latter; SIGUSR2 has the program that lies there now take this one's place.
    pub(super) fn obey(
        self,
        engine: Engine,
        reloader: Arc<Reloader>,
        upgrader: &Arc<Upgrader>,
    ) -> std::io::Result<()> {
        let Self { runtime, mut terminate, mut interrupt, mut hangup, mut reopen, upgrade: mut asked } = self;
        let reload = reloader.spawn()?;
        let upgrade = upgrader.spawn()?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async move {
                let mut draining: Option<Instant> = None;
                loop {
                    tokio::select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                        _ = reopen.recv() => {
                            reloader.reopen_logs();
                            tracing::info!("the access log and the audit file are opened anew");
                            continue;
                        }
                        _ = hangup.recv() => {
                            reloader.reopen_logs();
                            // Full: one that has not begun yet reads the file as it is now.
                            let _ = reload.try_send(());
                            continue;
                        }
                        _ = asked.recv() => {
                            // Full: one is under way, and another would be refused.
                            let _ = upgrade.try_send(());
                            continue;
                        }
                    }
                    match draining {
                        // A terminal and a script that both pass on Ctrl-C mean one.
                        Some(since) if since.elapsed() < SECOND_SIGNAL_AFTER => continue,
                        Some(_) => {
                            tracing::warn!("stopped at once; requests in progress were cut off");
                            std::process::exit(1);
                        }
                        None => draining = Some(Instant::now()),
                    }
                    notify::stopping();
                    engine.drain();
                    tracing::info!("a second signal ends at once");
                }
            });
        })?;
        Ok(())
    }
}

/// A start that signals end.
pub(super) struct Starting {
    serving: tokio::sync::oneshot::Sender<()>,
    thread: std::thread::JoinHandle<Signals>,
}

impl Starting {
    /// Clients are served: what signals do from now on is [`Signals::obey`]'s.
    pub(super) fn into_signals(self) -> std::io::Result<Signals> {
        let _ = self.serving.send(());
        self.thread.join().map_err(|_| std::io::Error::other("the thread that waits for them has ended"))
    }
}
