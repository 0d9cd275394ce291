//! How a server gets the sockets that another process holds for it.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::net::{SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::path::PathBuf;

use support::{Namespace, explained, needs_root};
use tidegate_gate::{ClassListeners, Gate, Handover, ListenQueue, Options};
use tidegate_policy::RuleSet;

#[test]
fn another_users_socket_of_the_abstract_name_keeps_root_from_nothing() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = explained(Gate::load(&RuleSet::default(), &Options::default()));
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    // Anybody may have it.
    let name = UnixAddr::from_abstract_name(format!("tidegate-queue {free}")).unwrap();
    let _taken = UnixListener::bind_addr(&name).unwrap();
    let (queue, _) = explained(ListenQueue::bind(&gate, free, 1, 8));
    let open = || Handover::open(free, queue.listeners().try_clone().unwrap());
    let held = open().unwrap();
    assert!(open().is_err(), "there is one holder");
    let got = ClassListeners::from_holder(free).unwrap().unwrap();
    assert_eq!(got.local_addr().unwrap(), free);
    drop(held);
    let again = open().unwrap();
    assert!(ClassListeners::from_holder(free).unwrap().is_some());
    drop(again);
}

#[test]
fn holder_that_died_is_replaced_and_other_namespaces_have_their_own() {
    needs_root();
    let address: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let held = || {
        let gate = explained(Gate::load(&RuleSet::default(), &Options::default()));
        let (queue, _) = explained(ListenQueue::bind(&gate, address, 1, 8));
        let held = Handover::open(address, queue.listeners().try_clone().unwrap()).unwrap();
        assert!(ClassListeners::from_holder(address).unwrap().is_some());
        (gate, queue, held)
    };
    let (one, other) = (Namespace::new(), Namespace::new());
    let in_namespace = |namespace: &Namespace| namespace.run(held);
    let first = in_namespace(&one);
    let _second = in_namespace(&other);
    let is_held = || ClassListeners::from_holder(address).unwrap().is_some();
    assert!(one.run(is_held) && other.run(is_held));
    drop(first);
    assert!(!one.run(is_held) && other.run(is_held));
    // As a holder leaves it that is killed.
    one.run(|| {
        let sockets = || -> Vec<PathBuf> {
            let all = std::fs::read_dir("/run/tidegate/queues").unwrap();
            all.map(|entry| entry.unwrap().path()).collect()
        };
        let before = sockets();
        let held = held();
        let ends = |path: &PathBuf| path.to_string_lossy().ends_with(&address.to_string());
        let path = sockets().into_iter().find(|path| ends(path) && !before.contains(path)).unwrap();
        drop(held);
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists() && !is_held());
    });
    drop(in_namespace(&one));
}
