//! Listeners of the Trickles transport: roots of routes, and what the accelerator has from upstreams, served without any
//! memory of clients.

mod exchange;
mod inner;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::ifaddrs::InterfaceAddress;
use tidegate_accelerator::settings::{Route, Settings, Target};
use tidegate_accelerator::{Inside, content_type};
use tidegate_core::metrics::{Kind, Sample};
use tidegate_trickles::http::{Asked, HttpService, Lost, Missing, Part, Resource, Site, StaticRoot};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{Config, Wait};
use tidegate_trickles::tcp::PacketSource;
use tidegate_trickles::udp::{Format, UdpService, least_mtu, random_block};

use tidegate_trickles_xdp::XdpSource;

use self::inner::InnerSite;
use crate::cli::Failure;
use crate::config::{Loaded, Subject, TricklesKey};
use crate::run::address_hint;
use crate::units::ListenAddress;

/// Far beyond any key file.
const MAX_KEY_FILE_BYTES: u64 = 64 * 1024;

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
    /// Whether clients have to encrypt.
    pub require_encryption: bool,
}

/// The running listeners.
pub(crate) struct TricklesServices {
    services: Vec<(UdpService, Option<PathBuf>)>,
    inside: Inside,
}

impl TricklesServices {
    /// Starts every listener.
    pub(crate) fn start(loaded: &Loaded, inside: &Inside) -> Result<Self, Failure> {
        let mut services = Vec::new();
        for listener in &loaded.trickles {
            let service = start(listener, &loaded.settings, inside).map_err(|obstacle| {
                let message =
                    format!("cannot serve Trickles on {}: {}", listener.listen.written, obstacle.what);
                let place = Subject::Trickles(listener.listen.address, obstacle.key);
                Failure::runtime(loaded.places.say(&place, &message, obstacle.hint))
            })?;
            services.push((service, listener.keys.clone()));
        }
        Ok(Self { services, inside: inside.clone() })
    }

    /// Reads the key files again. All of them come into force, or none.
    pub(crate) fn reload_keys(&self) -> Result<(), String> {
        let mut rings = Vec::new();
        for (service, path) in &self.services {
            if let Some(path) = path {
                rings.push((service, read_keys(path)?));
                if let Some(warning) = key_file_is_open(path) {
                    tracing::warn!("{warning}: {KEY_FILE_MODE}");
                }
            }
        }
        for (service, keys) in rings {
            let before = service.public_key();
            service.set_keys(keys);
            if service.public_key() != before {
                say_key(service);
            }
        }
        Ok(())
    }

    /// Ends every listener. Transfers need not: nobody misses them while another replica runs.
    pub(crate) fn stop(&self) {
        for (service, _) in &self.services {
            service.stop();
        }
    }

    /// Every metric, summed over threads and listeners; nothing where there is no listener.
    pub(crate) fn samples(&self) -> Vec<Sample> {
        let mut sum: Vec<Sample> = Vec::new();
        for counters in self.services.iter().flat_map(|(service, _)| service.counters()) {
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

    /// Where the listeners are, as URLs.
    pub(crate) fn urls(&self) -> impl Iterator<Item = String> {
        self.services.iter().map(|(service, _)| format!("trickles://{}", service.local_addr()))
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

fn start(listener: &TricklesListener, settings: &Settings, inside: &Inside) -> Result<UdpService, Obstacle> {
    let (address, written) = (listener.listen.address, &listener.listen.written);
    wide_enough(listener)?;
    let keys = match &listener.keys {
        Some(path) => {
            let keys = read_keys(path).map_err(|error| Obstacle {
                hint: KEY_FILE_HINT,
                ..Obstacle::at(TricklesKey::Keys, error)
            })?;
            if let Some(warning) = key_file_is_open(path) {
                tracing::warn!("listen {written}: {warning}: {KEY_FILE_MODE}");
            }
            keys
        }
        None => {
            tracing::warn!(
                "listen {written}: no keys: transfers end with this process, and no replica can go on with them"
            );
            KeyRing::new(0, &random_block().map_err(|error| Obstacle::at(TricklesKey::Address, error))?)
        }
    };
    let config = Config {
        require_encryption: listener.require_encryption,
        cache_entries: listener.cache_entries,
        ..Config::default()
    };
    let inner = InnerSite::new(inside.clone(), address);
    // Finds out what is wrong before the threads start.
    let sites = RoutedSites::open(&settings.routes, &inner)
        .map_err(|error| Obstacle::at(TricklesKey::Address, error))?;
    let service = match listener.format {
        Format::Udp => UdpService::start(address, settings.workers, &config, keys, || {
            let sites = RoutedSites::open(&settings.routes, &inner).map_err(std::io::Error::other)?;
            Ok(HttpService::new(sites, now_s))
        })
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
    Ok(service)
}

/// Tells what clients may pin.
fn say_key(service: &UdpService) {
    let key: String = service.public_key().iter().map(|byte| format!("{byte:02x}")).collect();
    tracing::info!("the key of trickles://{} for encryption is {key}", service.local_addr());
}

/// That the interface of a listener, where it has one of its own, carries the smallest packets that clients may ask for.
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
    (mode & 0o007 != 0)
        .then(|| format!("every user of this host can read or change the key file {}", path.display()))
}

pub(crate) fn read_keys(path: &Path) -> Result<KeyRing, String> {
    use std::io::Read;
    let mut text = String::new();
    let failed = |error| format!("cannot read the key file {}: {error}", path.display());
    // A pipe would be waited for.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(format!("cannot read the key file {}: it is no regular file", path.display()));
    }
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_KEY_FILE_BYTES).read_to_string(&mut text))
        .map_err(failed)?;
    KeyRing::from_text(&text).map_err(|error| format!("key file {}: {error}", path.display()))
}

/// What is behind all routes, the most specific first; the defence hears of every request whose client's address is
/// proved.
struct RoutedSites {
    inside: Inside,
    routes: Vec<(Route, Place)>,
}

/// What is behind a route.
enum Place {
    /// Replicas have the same files; no cache is needed.
    Root(StaticRoot),
    /// Upstreams, through the accelerator and its cache.
    Inner(InnerSite),
}

impl RoutedSites {
    fn open(routes: &[Route], inner: &InnerSite) -> Result<Self, String> {
        let mut opened = Vec::new();
        for route in routes {
            let place = match &route.target {
                Target::Root(path) => {
                    Place::Root(StaticRoot::open(path, content_type).map_err(|error| error.to_string())?)
                }
                _ => Place::Inner(inner.clone()),
            };
            opened.push((route.clone(), place));
        }
        opened.sort_by_key(|(route, _)| {
            let host = match route.host.strip_prefix('*') {
                None => (0, 0),
                Some("") => (2, 0),
                Some(suffix) => (1, usize::MAX - suffix.len()),
            };
            (host, usize::MAX - route.path.len())
        });
        Ok(Self { inside: inner.inside().clone(), routes: opened })
    }

    fn route(&mut self, host: &[u8], target: &[u8]) -> Option<&mut Place> {
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
        let found = self.routes.iter_mut().find(|(route, _)| matches(route));
        found.map(|(_, place)| place)
    }
}

impl Site for RoutedSites {
    fn find(&mut self, asked: &Asked<'_>) -> Result<Resource, Missing> {
        if self.inside.refuses(asked.peer.ip()) {
            return Err(Missing::Refused);
        }
        match self.route(asked.host, asked.target).ok_or(Missing::NotFound)? {
            Place::Root(root) => root.find(asked),
            Place::Inner(inner) => inner.find(asked),
        }
    }

    fn known(&mut self, host: &[u8], target: &[u8], version: u64) -> Result<Resource, Lost> {
        match self.route(host, target).ok_or(Lost::Gone)? {
            Place::Root(root) => root.known(host, target, version),
            Place::Inner(inner) => inner.known(host, target, version),
        }
    }

    fn takes_content(&mut self, host: &[u8], target: &[u8]) -> bool {
        matches!(self.route(host, target), Some(Place::Inner(_)))
    }

    fn prepare_find(&mut self, asked: &Asked<'_>) -> Option<Wait> {
        if asked.proved {
            self.inside.tell(|| exchange::head(asked), asked.peer.ip());
        }
        if self.inside.refuses(asked.peer.ip()) {
            return None;
        }
        match self.route(asked.host, asked.target)? {
            Place::Root(root) => root.prepare_find(asked),
            Place::Inner(inner) => inner.prepare_find(asked),
        }
    }

    fn prepare_read(&mut self, peer: SocketAddr, host: &[u8], target: &[u8], part: Part) -> Option<Wait> {
        match self.route(host, target)? {
            Place::Root(root) => root.prepare_read(peer, host, target, part),
            Place::Inner(inner) => inner.prepare_read(peer, host, target, part),
        }
    }

    fn read(
        &mut self,
        host: &[u8],
        target: &[u8],
        version: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, Lost> {
        match self.route(host, target).ok_or(Lost::Gone)? {
            Place::Root(root) => root.read(host, target, version, offset, buffer),
            Place::Inner(inner) => inner.read(host, target, version, offset, buffer),
        }
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
        let route = |host: &str, path: &str, name: &str| Route {
            host: host.into(),
            path: path.into(),
            target: root(name),
        };
        let routes = [
            route("*", "/", "any"),
            route("*.example.org", "/", "suffix"),
            route("www.example.org", "/api/", "exact-api"),
        ];
        let upstream =
            Route { host: "app.example".into(), path: "/".into(), target: Target::Upstream("app".into()) };
        let routes = [&routes[..], &[upstream]].concat();
        let inner = InnerSite::new(Inside::default(), ([127, 0, 0, 1], 1).into());
        let mut sites = RoutedSites::open(&routes, &inner).unwrap();
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
