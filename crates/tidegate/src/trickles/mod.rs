//! Listeners of the Trickles transport: roots of routes, and what the accelerator has from upstreams, served without
//! any memory of clients.

mod exchange;
mod inner;
mod outgoing;
mod streams;

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::ifaddrs::InterfaceAddress;
use tidegate_accelerator::settings::{Route, Settings, Target};
use tidegate_accelerator::{Inside, content_type};
use tidegate_core::metrics::{Kind, Sample};
use tidegate_trickles::http::{Asked, HttpService, Lost, Missing, Part, Resource, Site, StaticRoot};
use tidegate_trickles::keys::{KeyFileError, KeyRing};
use tidegate_trickles::mac::Block;
use tidegate_trickles::server::{Config, Wait};
use tidegate_trickles::tcp::PacketSource;
use tidegate_trickles::udp::{Format, UdpService, least_mtu, random_block};

use tidegate_trickles_xdp::XdpSource;
use tokio::sync::watch;

use self::inner::InnerSite;
use crate::cli::Failure;
use crate::config::{Loaded, Subject, TricklesKey};
use crate::run::address_hint;
use crate::units::ListenAddress;

/// Far beyond any key file.
const MAX_KEY_FILE_BYTES: u64 = 64 * 1024;

/// How long a worker waits that could not open its routes, before it tries again.
const FOLLOW_AGAIN: Duration = Duration::from_secs(1);

/// What a key file that cannot be read as one lacks.
pub(crate) const KEY_FILE_HINT: &str =
    "it has a line for each key: an epoch from 0 to 255 and 32 hexadecimal digits";
/// What to do about a key file that is open to all.
pub(crate) const KEY_FILE_MODE: &str =
    "whoever has a key can have packets sent to any address; `chmod 600` keeps others out";

/// A listener as configured.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct TricklesListener {
    pub listen: ListenAddress,
    /// The file of the keys that replicas share.
    pub keys: Option<PathBuf>,
    /// What packets look like on the way.
    pub format: Format,
    /// Where AF_XDP takes segments, of the format of TCP.
    pub interface: Option<String>,
    /// Entries of the soft-state cache.
    pub cache_entries: usize,
    /// Packets whose answers a worker remembers, in each half of its table.
    pub replay_entries: usize,
    /// Whether clients have to encrypt.
    pub require_encryption: bool,
}

/// The running listeners.
pub(crate) struct TricklesServices {
    services: RwLock<Vec<Running>>,
    /// The routes in force; every thread opens them for itself.
    routes: watch::Sender<Vec<Route>>,
    inside: Inside,
}

/// A running listener.
struct Running {
    service: Arc<UdpService>,
    /// As it was configured.
    listen: SocketAddr,
    keys: Keys,
}

/// Where the keys of a listener come from.
#[derive(Clone)]
enum Keys {
    File(PathBuf),
    /// Made at the start: another process that is to go on with transfers needs it.
    Made(Block),
}

/// A listener as the process before hands it over.
#[derive(Debug)]
pub(crate) struct HandedListener {
    /// As it was configured.
    pub listen: SocketAddr,
    pub sockets: Vec<UdpSocket>,
    /// What its keys are made of, if not of a file.
    pub made_of: Option<Block>,
}

/// What a reload puts in force once nothing can fail any more.
pub(crate) struct Renewal<'s> {
    services: &'s TricklesServices,
    rings: Vec<(Arc<UdpService>, KeyRing)>,
    routes: Vec<Route>,
}

impl TricklesServices {
    /// Starts every listener. `handed`: those of the process before, which serves too; in the format of TCP only one
    /// process can serve, so that such listeners are left to [`Self::start_rest`].
    pub(crate) fn start(
        loaded: &Loaded,
        inside: &Inside,
        handed: Option<Vec<HandedListener>>,
    ) -> Result<Self, Failure> {
        let routes = watch::Sender::new(loaded.settings.routes.clone());
        let services = Self { services: RwLock::default(), routes, inside: inside.clone() };
        let is_heir = handed.is_some();
        let mut handed = handed.unwrap_or_default();
        for listener in &loaded.trickles {
            if is_heir && listener.format == Format::Tcp {
                continue;
            }
            let at = handed.iter().position(|handed| handed.listen == listener.listen.address);
            services.start_one(listener, loaded, at.map(|at| handed.swap_remove(at)))?;
        }
        Ok(services)
    }

    /// The process before has stopped serving: starts what only one process can serve.
    pub(crate) fn start_rest(&self, loaded: &Loaded) {
        for listener in loaded.trickles.iter().filter(|listener| listener.format == Format::Tcp) {
            if let Err(failure) = self.start_one(listener, loaded, None) {
                tracing::error!("{}", failure.message);
            }
        }
    }

    fn start_one(
        &self,
        listener: &TricklesListener,
        loaded: &Loaded,
        handed: Option<HandedListener>,
    ) -> Result<(), Failure> {
        let in_force = self.routes.subscribe();
        let started = start(listener, &loaded.settings, &in_force, &self.inside, handed);
        let (service, keys) = started.map_err(|obstacle| {
            let message = format!("cannot serve Trickles on {}: {}", listener.listen.written, obstacle.what);
            let place = Subject::Trickles(listener.listen.address, obstacle.key);
            Failure::runtime(loaded.places.say(&place, &message, obstacle.hint))
        })?;
        let running = Running { service: Arc::new(service), listen: listener.listen.address, keys };
        self.services.write().unwrap_or_else(PoisonError::into_inner).push(running);
        Ok(())
    }

    fn services(&self) -> RwLockReadGuard<'_, Vec<Running>> {
        self.services.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// What another process needs to answer in the place of this one.
    pub(crate) fn hand_over(&self) -> io::Result<Vec<HandedListener>> {
        let handed = |running: &Running| {
            let made_of = match &running.keys {
                Keys::File(_) => None,
                Keys::Made(block) => Some(*block),
            };
            let sockets = running.service.sockets()?;
            Ok(HandedListener { listen: running.listen, sockets, made_of })
        };
        self.services().iter().map(handed).collect()
    }

    /// Reads the key files again, and looks whether the routes can be served.
    pub(crate) fn renew(&self, routes: &[Route]) -> Result<Renewal<'_>, String> {
        let mut rings = Vec::new();
        let services = self.services();
        if !services.is_empty() {
            open_sites(routes)?;
        }
        for running in services.iter() {
            if let Keys::File(path) = &running.keys {
                rings.push((
                    Arc::clone(&running.service),
                    read_keys(path).map_err(|error| error.to_string())?,
                ));
                if let Some(warning) = key_file_is_open(path) {
                    tracing::warn!("{warning}: {KEY_FILE_MODE}");
                }
            }
        }
        Ok(Renewal { services: self, rings, routes: routes.to_vec() })
    }

    /// Ends every listener. Transfers need not: nobody misses them while another replica runs.
    pub(crate) fn stop(&self) {
        self.services().iter().for_each(|running| running.service.stop());
    }

    /// Every metric, summed over threads and listeners; nothing where there is no listener.
    pub(crate) fn samples(&self) -> Vec<Sample> {
        let mut sum: Vec<Sample> = Vec::new();
        let services = self.services();
        for counters in services.iter().flat_map(|running| running.service.counters()) {
            let samples = counters.samples();
            if sum.is_empty() {
                sum = samples;
                continue;
            }
            for (total, sample) in sum.iter_mut().zip(samples) {
                total.value = total.value.wrapping_add(sample.value);
            }
        }
        if !sum.is_empty() {
            sum.push(Sample {
                name: "trickles_unjudged_total",
                help: "Requests that no core had room to judge.",
                kind: Kind::Counter,
                value: self.inside.untold(),
            });
        }
        sum
    }

    /// Where the listeners are, as URLs, and their keys for encryption.
    pub(crate) fn listeners(&self) -> Vec<(String, String)> {
        let url = |service: &UdpService| format!("trickles://{}", service.local_addr());
        let services = self.services();
        services.iter().map(|running| (url(&running.service), hexadecimal(&running.service))).collect()
    }
}

impl Renewal<'_> {
    /// Keys and routes come into force.
    pub(crate) fn apply(self) {
        for (service, keys) in self.rings {
            let before = service.public_key();
            service.set_keys(keys);
            if service.public_key() != before {
                say_key(&service);
            }
        }
        self.services.routes.send_if_modified(|routes| {
            let modified = *routes != self.routes;
            *routes = self.routes;
            modified
        });
    }
}

/// What keeps a listener from its work, and where the file can be mended.
struct Obstacle {
    key: TricklesKey,
    what: String,
    hint: &'static str,
}

impl Obstacle {
    fn at(key: TricklesKey, what: impl ToString) -> Self {
        Self { key, what: what.to_string(), hint: "" }
    }
}

fn start(
    listener: &TricklesListener,
    settings: &Settings,
    routes: &watch::Receiver<Vec<Route>>,
    inside: &Inside,
    handed: Option<HandedListener>,
) -> Result<(UdpService, Keys), Obstacle> {
    let (address, written) = (listener.listen.address, &listener.listen.written);
    wide_enough(listener)?;
    let (sockets, made_of) = handed.map_or((None, None), |handed| (Some(handed.sockets), handed.made_of));
    let (keys, whence) = match &listener.keys {
        Some(path) => {
            let keys = read_keys(path).map_err(|error| Obstacle {
                hint: KEY_FILE_HINT,
                ..Obstacle::at(TricklesKey::Keys, error)
            })?;
            if let Some(warning) = key_file_is_open(path) {
                tracing::warn!("listen {written}: {warning}: {KEY_FILE_MODE}");
            }
            (keys, Keys::File(path.clone()))
        }
        None => {
            tracing::warn!(
                "listen {written}: no keys: transfers end with this process, and no replica can go on with them"
            );
            let made = made_of.map_or_else(random_block, Ok);
            let block = made.map_err(|error| Obstacle::at(TricklesKey::Address, error))?;
            (KeyRing::new(0, &block), Keys::Made(block))
        }
    };
    let config = Config {
        require_encryption: listener.require_encryption,
        cache_entries: listener.cache_entries,
        replay_entries: listener.replay_entries,
        ..Config::default()
    };
    let inner = InnerSite::new(inside.clone(), address);
    // Finds out what is wrong before the threads start.
    let sites = RoutedSites::open(routes.clone(), &inner)
        .map_err(|error| Obstacle::at(TricklesKey::Address, error))?;
    let service = match listener.format {
        Format::Udp => {
            let site = || {
                let sites = RoutedSites::open(routes.clone(), &inner).map_err(io::Error::other)?;
                Ok(HttpService::new(sites, now_s))
            };
            match sockets {
                Some(sockets) => {
                    UdpService::start_on(sockets, address, settings.workers, &config, keys, site)
                }
                None => UdpService::start(address, settings.workers, &config, keys, site),
            }
        }
        .map_err(|error| Obstacle {
            hint: address_hint(error.kind()),
            ..Obstacle::at(TricklesKey::Address, error)
        }),
        Format::Tcp => {
            let source = listener.interface.as_deref().and_then(|name| xdp(name, address.port()));
            UdpService::start_tcp_format(address, source, &config, keys, HttpService::new(sites, now_s))
                .map_err(|error| Obstacle {
                    hint: "format = \"udp\" needs no privilege",
                    ..Obstacle::at(TricklesKey::Format, error)
                })
        }
    }?;
    say_key(&service);
    tracing::info!("listening on trickles://{}", service.local_addr());
    Ok((service, whence))
}

/// Tells what clients may pin.
fn say_key(service: &UdpService) {
    let key = hexadecimal(service);
    tracing::info!("the key of trickles://{} for encryption is {key}", service.local_addr());
}

fn hexadecimal(service: &UdpService) -> String {
    service.public_key().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// That the interface of a listener, where it has one of its own, carries the smallest packets that clients may ask
/// for.
fn wide_enough(listener: &TricklesListener) -> Result<(), Obstacle> {
    let ip = listener.listen.address.ip();
    let (key, name) = match &listener.interface {
        Some(name) => (TricklesKey::Interface, Some(name.clone())),
        None => (TricklesKey::Address, interface_of(ip)),
    };
    let Some(name) = name else { return Ok(()) };
    // Without such a file there is no such interface; what opens it says so.
    let mtu = std::fs::read_to_string(format!("/sys/class/net/{name}/mtu"));
    let Some(mtu) = mtu.ok().and_then(|text| text.trim().parse::<u32>().ok()) else { return Ok(()) };
    let least = least_mtu(listener.format, ip.is_ipv6());
    if mtu >= least {
        return Ok(());
    }
    let what = format!("packets on {name} have at most {mtu} bytes, and Trickles needs {least}");
    Err(Obstacle { hint: "raise its MTU: ip link set DEVICE mtu BYTES", ..Obstacle::at(key, what) })
}

/// The interface with this address.
fn interface_of(ip: IpAddr) -> Option<String> {
    let addresses = nix::ifaddrs::getifaddrs().ok()?;
    let has = |address: &InterfaceAddress| {
        let storage = address.address?;
        let v4 = storage.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        Some(v4.or_else(|| storage.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))? == ip)
    };
    addresses.filter(|address| has(address) == Some(true)).map(|address| address.interface_name).next()
}

/// Segments by AF_XDP; `None`, and a line that says why, where AF_PACKET has to do.
fn xdp(interface: &str, port: u16) -> Option<Box<dyn PacketSource>> {
    match XdpSource::open(interface, port) {
        Ok(source) => {
            tracing::info!("AF_XDP takes Trickles segments on {interface}");
            Some(Box::new(source))
        }
        Err(error) => {
            tracing::warn!("no AF_XDP on {interface} ({error}): AF_PACKET takes Trickles segments instead");
            None
        }
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Who else can read the key file, in words of a warning.
pub(crate) fn key_file_is_open(path: &Path) -> Option<String> {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(path).ok()?.permissions().mode();
    let can = match (mode & 0o004 != 0, mode & 0o002 != 0) {
        (true, true) => "read and change",
        (true, false) => "read",
        (false, true) => "change",
        (false, false) => return None,
    };
    Some(format!("every user of this host can {can} the key file {}", path.display()))
}

/// Why there are no keys.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeysError {
    #[error("cannot read the key file {}: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("key file {}: {source}", path.display())]
    Malformed { path: PathBuf, source: KeyFileError },
}

impl KeysError {
    /// Whether the file may be right on the host that the configuration is for, or for the user that tidegate runs as.
    pub(crate) fn is_of_this_host(&self) -> bool {
        use io::ErrorKind::{NotFound, PermissionDenied};
        matches!(self, Self::Unreadable { source, .. } if matches!(source.kind(), NotFound | PermissionDenied))
    }
}

pub(crate) fn read_keys(path: &Path) -> Result<KeyRing, KeysError> {
    let text = key_file(path).map_err(|source| KeysError::Unreadable { path: path.to_path_buf(), source })?;
    KeyRing::from_text(&text).map_err(|source| KeysError::Malformed { path: path.to_path_buf(), source })
}

fn key_file(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    // A pipe would be waited for.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    std::fs::File::open(path)?.take(MAX_KEY_FILE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// What is behind all routes, the most specific first; the defence hears of every request whose client's address is
/// proved.
struct RoutedSites {
    inner: InnerSite,
    in_force: watch::Receiver<Vec<Route>>,
    sites: Vec<(Route, RouteSite)>,
    /// When routes that are in force could not be opened.
    failed: Option<Instant>,
}

/// What is behind a route.
enum RouteSite {
    /// Replicas have the same files; no cache is needed.
    Root(StaticRoot),
    /// Upstreams, through the accelerator and its cache.
    Inner,
}

/// Opens what is behind routes, the most specific first.
fn open_sites(routes: &[Route]) -> Result<Vec<(Route, RouteSite)>, String> {
    let mut sites = Vec::new();
    for route in routes {
        let site = match &route.target {
            // What a route changes of heads is the accelerator's business.
            Target::Root(path) if route.response_fields.is_empty() => {
                RouteSite::Root(StaticRoot::open(path, content_type).map_err(|error| error.to_string())?)
            }
            _ => RouteSite::Inner,
        };
        sites.push((route.clone(), site));
    }
    sites.sort_by_key(|(route, _)| {
        let host = match route.host.strip_prefix('*') {
            None => (0, 0),
            Some("") => (2, 0),
            Some(suffix) => (1, usize::MAX - suffix.len()),
        };
        (host, usize::MAX - route.path.len())
    });
    Ok(sites)
}

impl RoutedSites {
    fn open(mut in_force: watch::Receiver<Vec<Route>>, inner: &InnerSite) -> Result<Self, String> {
        let sites = open_sites(&in_force.borrow_and_update())?;
        Ok(Self { inner: inner.clone(), in_force, sites, failed: None })
    }

    /// Follows a reload. Roots were there when it looked; where one has gone since, or descriptors are used up, nothing
    /// is served until all of them can be opened: the old routes are not in force any more.
    fn follow(&mut self) {
        let is_due = self.failed.is_some_and(|failed| failed.elapsed() >= FOLLOW_AGAIN);
        if is_due || self.in_force.has_changed().unwrap_or(false) {
            let opened = open_sites(&self.in_force.borrow_and_update());
            self.failed = opened.is_err().then(Instant::now);
            self.sites = opened.unwrap_or_else(|error| {
                tracing::error!("a Trickles listener serves nothing until it has its routes: {error}");
                Vec::new()
            });
        }
    }

    /// The site behind the route of a request.
    fn site(&mut self, host: &[u8], target: &[u8]) -> Option<&mut dyn Site> {
        self.follow();
        let name = match host.iter().rposition(|byte| *byte == b':') {
            Some(at) if !host[at..].contains(&b']') => &host[..at],
            _ => host,
        };
        let matches = |route: &Route| {
            let host_matches = match route.host.strip_prefix('*') {
                None => route.host.as_bytes() == host || route.host.as_bytes() == name,
                Some(suffix) => name.ends_with(suffix.as_bytes()),
            };
            host_matches && target.starts_with(route.path.as_bytes())
        };
        match self.sites.iter_mut().find(|(route, _)| matches(route))? {
            (_, RouteSite::Root(root)) => Some(root),
            (_, RouteSite::Inner) => Some(&mut self.inner),
        }
    }
}

impl Site for RoutedSites {
    fn find(&mut self, asked: &Asked<'_>) -> Result<Resource, Missing> {
        if self.inner.inside().refuses(asked.peer.ip()) {
            return Err(Missing::Refused);
        }
        self.site(asked.host, asked.target).ok_or(Missing::NotFound)?.find(asked)
    }

    fn known(&mut self, host: &[u8], target: &[u8], version: u64) -> Result<Resource, Lost> {
        self.site(host, target).ok_or(Lost::Gone)?.known(host, target, version)
    }

    fn takes_content(&mut self, host: &[u8], target: &[u8]) -> bool {
        self.site(host, target).is_some_and(|site| site.takes_content(host, target))
    }

    fn prepare_find(&mut self, asked: &Asked<'_>) -> Option<Wait> {
        let inside = self.inner.inside();
        if asked.proved {
            inside.tell(|| outgoing::head(asked), asked.peer.ip());
        }
        if inside.refuses(asked.peer.ip()) {
            return None;
        }
        self.site(asked.host, asked.target)?.prepare_find(asked)
    }

    fn prepare_read(&mut self, peer: SocketAddr, host: &[u8], target: &[u8], part: Part) -> Option<Wait> {
        if self.inner.inside().refuses(peer.ip()) {
            return None;
        }
        self.site(host, target)?.prepare_read(peer, host, target, part)
    }

    fn read(
        &mut self,
        host: &[u8],
        target: &[u8],
        version: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, Lost> {
        self.site(host, target).ok_or(Lost::Gone)?.read(host, target, version, offset, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_route_answers() {
        let directory = tempfile::tempdir().unwrap();
        let root = |name: &str| {
            let path = directory.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("x"), name).unwrap();
            std::fs::create_dir(path.join("api")).unwrap();
            std::fs::write(path.join("api/x"), name).unwrap();
            Target::Root(path)
        };
        let route = |host: &str, path: &str, name: &str| Route::new(host, path, root(name));
        let routes = [
            route("*", "/", "any"),
            route("*.example.org", "/", "suffix"),
            route("www.example.org", "/api/", "exact-api"),
        ];
        let upstream = Route::new("app.example", "/", Target::Upstream("app".into()));
        let routes = [&routes[..], &[upstream]].concat();
        let inner = InnerSite::new(Inside::default(), ([127, 0, 0, 1], 1).into());
        let (_in_force, following) = watch::channel(routes);
        let mut sites = RoutedSites::open(following, &inner).unwrap();
        let peer = ([192, 0, 2, 1], 1).into();
        let asked = |host, target| Asked {
            peer,
            proved: false,
            request: 1,
            host,
            target,
            head: &b""[..],
            body: &b""[..],
        };
        for (host, path, length) in [
            ("other", "/x", 3),
            ("a.example.org:81", "/x", 6),
            ("www.example.org", "/x", 6),
            ("www.example.org:8080", "/api/x", 9),
            ("[::1]:80", "/x", 3),
        ] {
            let found = sites.find(&asked(host.as_bytes(), path.as_bytes())).unwrap();
            assert_eq!(found.length, length, "{host}{path}");
        }
        assert_eq!(sites.find(&asked(b"other", b"/none")), Err(Missing::NotFound));
        assert!(sites.takes_content(b"app.example", b"/x") && !sites.takes_content(b"other", b"/x"));
    }
}
