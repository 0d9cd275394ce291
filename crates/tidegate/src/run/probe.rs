//! Whether the servers of upstreams are there.

use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use tidegate_accelerator::settings::{ServerAddress, Upstream};
use tidegate_accelerator::tls::Trust;

use crate::cli::Failure;
use crate::config::{Loaded, Subject};

/// How long each server is given to accept the connection that shows it is there.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Upstream servers that are probed at the same time, each by a thread.
const PROBES_AT_ONCE: usize = 32;

/// A group whose every server is down at the start is more likely a wrong address than bad luck.
pub(super) fn probe_upstreams(loaded: &Loaded) -> Result<(), Failure> {
    match unreachable_upstreams(loaded).first() {
        None => Ok(()),
        Some((group, why)) => {
            let hint = "start it first, or use --allow-unreachable";
            Err(Failure::runtime(loaded.places.say(group, why, hint)))
        }
    }
}

/// The required groups none of whose servers takes a connection, and why.
pub(super) fn unreachable_upstreams(loaded: &Loaded) -> Vec<(Subject, String)> {
    let required = |upstream: &&Upstream| loaded.required.contains(&upstream.name);
    let groups = || loaded.settings.upstreams.iter().filter(required);
    let mut servers = Vec::new();
    for upstream in groups() {
        // What is wrong with it, the start finds out.
        let trust = upstream.trust().ok().flatten();
        servers.extend(upstream.servers.iter().map(|server| (server, trust.clone())));
    }
    let errors = probe(&servers);
    let servers = servers.iter().map(|(server, _)| *server);
    let mut of_servers = errors.iter().zip(servers);
    let unreachable = groups().filter_map(|upstream| {
        let of_group: Vec<_> = of_servers.by_ref().take(upstream.servers.len()).collect();
        let failures: Vec<String> = of_group
            .iter()
            .filter_map(|(error, server)| Some(format!("{server}: {}", error.as_ref()?)))
            .collect();
        let group = match upstream.name.as_str() {
            "upstream" => "the upstream".to_owned(),
            name => format!("upstream {name}"),
        };
        let all = !failures.is_empty() && failures.len() == of_group.len();
        let message = || format!("{group} is unreachable ({})", failures.join(", "));
        all.then(|| (Subject::Upstream(upstream.name.clone()), message()))
    });
    unreachable.collect()
}

/// Connects to every server, to many at once; gives the error of each that takes no connection, or is not the one that it
/// should be.
fn probe(servers: &[(&ServerAddress, Option<Trust>)]) -> Vec<Option<std::io::Error>> {
    let connect = |server: &ServerAddress, trust: Option<&Trust>| match server {
        ServerAddress::Ip(address) => TcpStream::connect_timeout(address, PROBE_TIMEOUT).err(),
        ServerAddress::Tls(server) => trust?.probe(server, PROBE_TIMEOUT).err(),
        ServerAddress::Unix(path) => probe_unix(path).err(),
    };
    let mut errors = Vec::with_capacity(servers.len());
    for together in servers.chunks(PROBES_AT_ONCE) {
        std::thread::scope(|scope| {
            let probes: Vec<_> = together
                .iter()
                .map(|(server, trust)| {
                    let probe = move || connect(server, trust.as_ref());
                    std::thread::Builder::new().spawn_scoped(scope, probe)
                })
                .collect();
            // A server whose probe could not be made is not said to be unreachable.
            errors.extend(
                probes.into_iter().map(|probe| probe.ok().and_then(|probe| probe.join().ok().flatten())),
            );
        });
    }
    errors
}

fn probe_unix(path: &Path) -> std::io::Result<()> {
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(socket, &SocketAddrUnix::new(path)?) {
        // Somebody listens, and others wait already.
        Err(Errno::AGAIN) => Ok(()),
        connected => Ok(connected?),
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, connect, listen, socket};

    use super::*;

    #[test]
    fn server_whose_queue_is_full_is_reachable_and_one_that_is_not_there_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name| ServerAddress::Unix(directory.path().join(name));
        let (full, absent) = (at("full.sock"), at("absent.sock"));
        let address = SocketAddrUnix::new(directory.path().join("full.sock")).unwrap();
        let [listener, first] =
            [(); 2].map(|()| socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap());
        bind(&listener, &address).unwrap();
        listen(&listener, 0).unwrap();
        connect(&first, &address).unwrap();
        let errors = probe(&[(&full, None), (&absent, None)]);
        assert!(errors[0].is_none(), "{errors:?}");
        assert_eq!(errors[1].as_ref().unwrap().kind(), std::io::ErrorKind::NotFound);
    }
}
