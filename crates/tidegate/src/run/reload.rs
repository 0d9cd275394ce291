//! What a running process takes from its configuration file anew.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate_accelerator::{Engine, Whose};

use super::probe::unreachable_upstreams;
use super::{in_force, listening, setting_error};
use crate::acme::{self, Acme};
use crate::cli::RunArgs;
use crate::config::{Finding, Loaded, Subject};
use crate::defence::Guard;
use crate::gate::Gatekeeper;
use crate::notify;
use crate::trickles::TricklesServices;

/// Puts the configuration file in force again, if there is one.
pub(crate) struct Reloader {
    pub(super) args: RunArgs,
    /// What the process was started with.
    pub(super) started: Loaded,
    pub(super) engine: Engine,
    pub(super) gatekeeper: Arc<Gatekeeper>,
    pub trickles: TricklesServices,
    /// What watches clients, unless that is off.
    pub guard: Option<Arc<Guard>>,
    /// What has certificates issued.
    pub acme: Arc<Acme>,
    /// Reloads come by a signal and from the admin server; of two at once one would put in force what the other
    /// replaces.
    pub(super) one_at_a_time: Mutex<()>,
    /// Another process serves.
    pub(super) is_over: AtomicBool,
}

/// Of each HTTP listener the sockets of its priority classes; none where it has one for each data core.
pub(crate) fn classes(engine: &Engine) -> std::io::Result<Vec<(SocketAddr, Vec<TcpListener>)>> {
    let listening = engine
        .listening()?
        .into_iter()
        .filter(|listening| !matches!(listening.whose, Whose::Dhttp | Whose::Http3));
    let by_class = listening.map(|listening| {
        let sockets = match listening.whose {
            Whose::Classes => listening.sockets.into_iter().map(TcpListener::from).collect(),
            Whose::Cores | Whose::Dhttp | Whose::Http3 => Vec::new(),
        };
        (listening.address, sockets)
    });
    Ok(by_class.collect())
}

impl Reloader {
    /// Whether the cache has a file.
    pub(crate) fn keeps_the_cache(&self) -> bool {
        self.started.settings.cache.path.is_some()
    }

    /// Where the engine listens, as URLs. Listeners stay what they were at the start.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = String> {
        listening(&self.engine, &self.started.settings)
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn gatekeeper(&self) -> &Gatekeeper {
        &self.gatekeeper
    }

    /// Keeps reloads waiting for as long as the result lives.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reloads are refused from now on.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }

    /// Opens the access log and the audit file anew, as after they were renamed.
    pub(super) fn reopen_logs(&self) {
        self.engine.reopen_log();
        if let Some(guard) = &self.guard {
            guard.reopen_audit();
        }
    }

    /// Begins a thread that reloads whenever it is told to, since a reload may wait for servers. Of several that are
    /// asked for during one, the last reads the file for all of them.
    pub(super) fn spawn(self: &Arc<Self>) -> std::io::Result<SyncSender<()>> {
        let (sender, asked) = sync_channel(1);
        let reloader = Arc::clone(self);
        std::thread::Builder::new().name("reload".into()).spawn(move || {
            // What comes of them is logged.
            asked.iter().for_each(|()| drop(reloader.reload()));
        })?;
        Ok(sender)
    }

    /// What a reload that succeeds has done.
    pub(crate) fn done(&self) -> String {
        match &self.args.config {
            Some(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                format!("{} was read again and is in force", path.display())
            }
            None => "there is no configuration file to read again: tidegate was started without --config, and only looked \
                     up anew what its command line names; to change more, start it with --config FILE"
                .into(),
        }
    }

    /// All of the file comes into force or, with the reason as the error, nothing. Returns its warnings.
    pub(crate) fn reload(&self) -> Result<Vec<Finding>, String> {
        let _turn = self.turn();
        if self.is_over.load(Ordering::SeqCst) {
            return Err("another process has taken the place of this one".into());
        }
        notify::reloading();
        let result = self.read_and_apply();
        match &result {
            Ok(_) => {
                tracing::info!("{}", self.done());
                notify::ready("serving");
            }
            Err(error) => {
                tracing::error!("the old configuration stays in force: {error}");
                notify::ready(&format!("serving; the old configuration stays in force: {error}"));
            }
        }
        result
    }

    fn read_and_apply(&self) -> Result<Vec<Finding>, String> {
        let loaded = in_force(&self.args).map_err(|failure| failure.message)?;
        let (old, new) = (&self.started, &loaded);
        let needs_restart = [
            ("[[listen]]", old.settings.listeners != new.settings.listeners || old.trickles != new.trickles),
            ("[admin]", old.admin.address != new.admin.address),
            ("cache.memory", old.settings.cache.memory_bytes != new.settings.cache.memory_bytes),
            ("cache.path", old.settings.cache.path != new.settings.cache.path),
            ("cache.max_object", old.settings.cache.max_object_bytes != new.settings.cache.max_object_bytes),
            ("[log]", old.settings.access_log != new.settings.access_log),
            ("workers", old.settings.workers != new.settings.workers),
            ("[gate]", old.gate.options != new.gate.options || old.gate.kernel != new.gate.kernel),
            ("gate.interfaces", old.gate.interfaces != new.gate.interfaces),
            ("gate.http_ports", old.gate.http_ports != new.gate.http_ports),
            ("defence.enabled", old.defence.enabled != new.defence.enabled),
            ("defence.external", old.defence.external != new.defence.external),
            ("defence.audit", old.defence.audit != new.defence.audit),
            ("defence.memory", old.defence.settings.memory_bytes != new.defence.settings.memory_bytes),
            ("[adapt]", old.gate.wanted.goals != new.gate.wanted.goals),
            ("block.shut_windows", old.gate.shut_windows != new.gate.shut_windows),
            ("block.path", old.gate.blocks.directory != new.gate.blocks.directory),
        ];
        let changed: Vec<&str> =
            needs_restart.iter().filter(|(_, changed)| *changed).map(|(name, _)| *name).collect();
        if !changed.is_empty() {
            let refused = changed.iter().map(|name| {
                let place = self.place_of_change(name, &loaded).map_or(String::new(), |place| place + ": ");
                format!("{place}{name} cannot change while running; restart to apply it")
            });
            return Err(refused.collect::<Vec<_>>().join("\n"));
        }
        let certificates = loaded.acme.as_ref().map(acme::prepare).transpose();
        let certificates = certificates
            .map_err(|error| loaded.places.say(&Subject::ACME_PATH, &error.to_string(), acme::PATH_HINT))?;
        let trickles = self.trickles.renew(&loaded.settings.routes)?;
        let before = self.gatekeeper.settings();
        self.gatekeeper.reload(&loaded.gate).map_err(|error| error.to_string())?;
        let mut settings = loaded.settings.clone();
        self.gatekeeper.guard(&mut settings, &loaded.gate.rules);
        settings.issued = Arc::clone(self.acme.issued());
        if let Err(error) = self.engine.reload(settings) {
            // All or nothing.
            self.gatekeeper.reload(&before).map_err(|error| error.to_string())?;
            return Err(setting_error(&error, &loaded));
        }
        trickles.apply();
        self.acme.apply(certificates);
        if let Some(guard) = &self.guard {
            guard.defence().set_settings(loaded.defence.settings.clone());
        }
        let mut warnings = loaded.warnings.clone();
        let file = self.args.config.as_ref().map_or(String::new(), |path| path.display().to_string());
        warnings.extend(unreachable_upstreams(&loaded).into_iter().map(|(group, message)| {
            tracing::warn!("{message}");
            let elsewhere =
                || Finding { file: file.clone(), place: None, message: message.clone(), hint: None };
            loaded.places.finding(&group, &message, "").unwrap_or_else(elsewhere)
        }));
        Ok(warnings)
    }

    /// Where the file says what has changed: of listeners the first that was not there before, and of what the file no
    /// longer says the file.
    fn place_of_change(&self, name: &str, new: &Loaded) -> Option<String> {
        let old = &self.started.settings.listeners;
        let listener = new.settings.listeners.iter().find(|listener| !old.contains(listener));
        let listener = listener.filter(|_| name == "[[listen]]");
        let by_address = listener.and_then(|other| new.places.place(&Subject::Listener(other.address)));
        let key = Subject::Key(name.trim_matches(['[', ']']).to_owned().into());
        let file = || self.args.config.as_ref().map(|path| path.display().to_string());
        by_address.or_else(|| new.places.place(&key)).or_else(file)
    }
}
