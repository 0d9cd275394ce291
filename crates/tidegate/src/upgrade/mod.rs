//! `tidegate upgrade`: the program that lies at this process's path now takes its place, while clients are served.

mod attempt;
mod predecessor;
mod program;
mod protocol;
mod wire;

use std::net::{SocketAddr, TcpListener};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tidegate_core::metrics::{Kind, Sample};
use tokio::sync::watch;

pub(crate) use self::predecessor::{Inheritance, Predecessor};
pub(crate) use self::program::Program;
use crate::run::Reloader;

/// How long a process that was killed is waited for.
const REAP_TIMEOUT: Duration = Duration::from_secs(10);
const REAP_INTERVAL: Duration = Duration::from_millis(5);

/// Which process serves now.
#[derive(Clone, Debug)]
pub(crate) struct Upgraded {
    pub pid: u32,
    pub version: String,
}

/// Has another process take the place of this one.
pub(crate) struct Upgrader {
    program: Program,
    reloader: Arc<Reloader>,
    /// The admin server's socket, and its address as configured.
    admin: (SocketAddr, TcpListener),
    /// Tells the admin server that it is another process's.
    close_admin: watch::Sender<bool>,
    one_at_a_time: Mutex<()>,
    /// The new process, until it has succeeded.
    child: Mutex<Option<Child>>,
    /// Tells the new process what is outdated.
    teller: Mutex<Option<JoinHandle<()>>>,
    /// Whether the process before still finishes what it has begun.
    has_predecessor: Arc<AtomicBool>,
    has_handed_over: AtomicBool,
    begun: AtomicU64,
    failed: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one assignment, so that a panic elsewhere leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Upgrader {
    pub(crate) fn new(
        program: Program,
        reloader: Arc<Reloader>,
        admin: (SocketAddr, TcpListener),
        close_admin: watch::Sender<bool>,
        has_predecessor: Arc<AtomicBool>,
    ) -> Arc<Self> {
        Arc::new(Self {
            program,
            reloader,
            admin,
            close_admin,
            one_at_a_time: Mutex::default(),
            child: Mutex::default(),
            teller: Mutex::default(),
            has_predecessor,
            has_handed_over: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        })
    }

    /// Starts the program, and returns when it serves in the place of this process, which drains from then on. After an
    /// error, of one line, everything is as before.
    pub(crate) fn upgrade(&self) -> Result<Upgraded, String> {
        let _turn = match self.one_at_a_time.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err("an upgrade is under way already".into()),
        };
        self.may_begin()?;
        // A reload would put in force what the new process has not read.
        let _no_reload = self.reloader.turn();
        self.begun.fetch_add(1, Ordering::Relaxed);
        tracing::info!("upgrade: {} is started", self.program.path.display());
        match self.attempt() {
            Ok(upgraded) => {
                let Upgraded { pid, version } = &upgraded;
                tracing::info!(
                    "upgrade: tidegate {version} serves as process {pid}; this one drains and ends"
                );
                self.has_handed_over.store(true, Ordering::SeqCst);
                self.reloader.end();
                self.close_admin.send_replace(true);
                self.reloader.engine().drain_for_successor();
                Ok(upgraded)
            }
            Err(error) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                tracing::error!("upgrade: {error}; this process goes on as before");
                Err(error)
            }
        }
    }

    fn may_begin(&self) -> Result<(), String> {
        if std::process::id() == 1 {
            return Err("this is the first process of a container, which ends with it: restart that".into());
        }
        if self.has_handed_over.load(Ordering::SeqCst) {
            return Err("another process has taken the place of this one".into());
        }
        if self.reloader.engine().is_draining() {
            return Err("tidegate is draining".into());
        }
        if self.has_predecessor.load(Ordering::SeqCst) {
            return Err("the process before still finishes its requests".into());
        }
        Ok(())
    }

    /// Begins a thread that upgrades whenever it is told to.
    pub(crate) fn spawn(self: &Arc<Self>) -> std::io::Result<SyncSender<()>> {
        let (sender, asked) = sync_channel(1);
        let upgrader = Arc::clone(self);
        std::thread::Builder::new().name("upgrade".into()).spawn(move || {
            for () in asked {
                // What comes of one that began is logged.
                let before = upgrader.begun.load(Ordering::Relaxed);
                if let Err(error) = upgrader.upgrade()
                    && upgrader.begun.load(Ordering::Relaxed) == before
                {
                    tracing::error!("upgrade: {error}");
                }
            }
        })?;
        Ok(sender)
    }

    /// Whether another process serves in the place of this one.
    pub(crate) fn has_handed_over(&self) -> bool {
        self.has_handed_over.load(Ordering::SeqCst)
    }

    /// To be called when this process ends: one that has not taken its place by then ends too, and one that has is told
    /// everything.
    pub(crate) fn end(&self) {
        self.end_child();
        self.reloader.engine().tell_nobody();
        if let Some(teller) = lock(&self.teller).take() {
            // A panic there has been printed; there is nothing to add.
            let _ = teller.join();
        }
    }

    /// Ends the process that has not succeeded, if there is one. `false`: it could not be ended.
    fn end_child(&self) -> bool {
        let Some(mut child) = lock(&self.child).take() else { return true };
        // One that has ended already is what is wanted.
        let _ = child.kill();
        let until = Instant::now() + REAP_TIMEOUT;
        while Instant::now() < until {
            if matches!(child.try_wait(), Ok(Some(_)) | Err(_)) {
                return true;
            }
            std::thread::sleep(REAP_INTERVAL);
        }
        false
    }

    /// What `/metrics` says.
    pub(crate) fn samples(&self) -> [Sample; 2] {
        let counter = |name, help, value: &AtomicU64| Sample {
            name,
            help,
            kind: Kind::Counter,
            value: value.load(Ordering::Relaxed),
        };
        [
            counter("upgrades_total", "Upgrades to another program that were begun.", &self.begun),
            counter("upgrades_failed_total", "Upgrades after which this process went on.", &self.failed),
        ]
    }
}
