//! Certificates that are ordered: pebble, an authority for tests, looks whether names are ours as public ones do.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use serde_json::Value;
use tempfile::TempDir;
use tidegate_e2e::{Certificate, Origin, Process, Reply, Tidegate, eventually, free_port, within};

/// An authority, and the DNS in which it looks names up: each of them is 127.0.0.1.
struct Authority {
    _processes: [Process; 2],
    files: TempDir,
    directory: SocketAddr,
}

/// Where the authority looks whether a name is ours.
#[derive(Clone, Copy)]
struct Looks {
    https: u16,
    http: u16,
}

impl Authority {
    fn start(looks: Looks, valid_s: u64) -> Self {
        let files = tempfile::tempdir().unwrap();
        Certificate::of(&["localhost", "127.0.0.1"]).write(files.path(), "directory");
        let [directory, management, dns] = [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
        let path = |name: &str| files.path().join(name);
        let config = serde_json::json!({ "pebble": {
            "listenAddress": directory.to_string(), "managementListenAddress": management.to_string(),
            "certificate": path("directory.crt"), "privateKey": path("directory.key"),
            "httpPort": looks.http, "tlsPort": looks.https, "certificateValidityPeriod": valid_s,
        }});
        std::fs::write(path("pebble.json"), config.to_string()).unwrap();
        let off = |name: &str| format!("-{name}=");
        let mut names = Command::new("pebble-challtestsrv");
        names.args([off("http01"), off("https01"), off("tlsalpn01"), off("management"), off("defaultIPv6")]);
        names.arg(format!("-dns01={dns}"));
        let mut pebble = Command::new("pebble");
        pebble.arg("-config").arg(path("pebble.json")).args(["-dnsserver", &dns.to_string()]);
        pebble.env("PEBBLE_VA_NOSLEEP", "1");
        // One in twenty by default, of which the library bears two in a row.
        pebble.env("PEBBLE_WFE_NONCEREJECT", "0");
        let processes = [names, pebble].map(|mut command| {
            let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
            Process(child.expect("Debian's package pebble"))
        });
        eventually("the authority listens", || std::net::TcpStream::connect(directory).ok());
        Self { _processes: processes, files, directory }
    }

    /// The table that orders of it.
    fn table(&self, names: &[&str], path: &Path) -> String {
        let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
        let (directory, authority) = (self.directory, self.files.path().join("directory.crt"));
        format!(
            "[acme]\nnames = [{}]\nemail = \"ops@example.org\"\ndirectory = \"https://{directory}/dir\"\n\
             path = {path:?}\nauthority = {authority:?}\n",
            names.join(", ")
        )
    }
}

fn listen(address: SocketAddr, protocol: &str) -> String {
    format!("[[listen]]\naddress = \"{address}\"\nprotocol = \"{protocol}\"\n")
}

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port()))
}

/// Takes any certificate, to be looked at.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.3 is what is spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The chain that a client is shown that asks for this name and speaks this protocol.
fn shown(address: SocketAddr, name: &str, protocol: &[u8]) -> io::Result<Vec<CertificateDer<'static>>> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone(provider)))
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut tls = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut socket = std::net::TcpStream::connect(address)?;
    socket.set_read_timeout(Some(tidegate_e2e::PATIENCE))?;
    while tls.is_handshaking() {
        tls.complete_io(&mut socket)?;
    }
    Ok(tls.peer_certificates().unwrap_or_default().to_vec())
}

/// The certificate for a name, once it was issued: it has been signed by another one, which follows.
fn issued(address: SocketAddr, name: &str) -> Option<CertificateDer<'static>> {
    let chain = shown(address, name, b"http/1.1").ok()?;
    let is_for = |leaf: &CertificateDer<'_>| leaf.windows(name.len()).any(|part| part == name.as_bytes());
    (chain.len() > 1).then(|| chain[0].clone()).filter(is_for)
}

fn status(tidegate: &Tidegate) -> Value {
    serde_json::from_slice(&tidegate.ask_admin("/status").body).unwrap()
}

#[test]
fn certificates_are_ordered_kept_and_shown_again_after_a_restart() {
    let (tls, clear) = (loopback(), loopback());
    let authority = Authority::start(Looks { https: tls.port(), http: clear.port() }, 90 * 24 * 3600);
    let kept = tempfile::tempdir().unwrap();
    let origin = Origin::start(|_| Reply::ok("x"));
    let table = authority.table(&["a.example", "b.example"], kept.path());
    let listeners = listen(tls, "https") + &listen(clear, "http");
    let mut tidegate = Tidegate::builder().origin(&origin).tables(&(listeners + &table)).start();
    let first = ["a.example", "b.example"].map(|name| eventually(name, || issued(tls, name)));
    assert_ne!(first[0], first[1], "each name has its own");
    // Who asks for no name that there is one for is shown one of those all the same.
    assert_eq!(shown(tls, "c.example", b"http/1.1").unwrap()[0], first[0]);
    eventually("both are counted", || (tidegate.metric("tidegate_acme_orders_total") == 2.0).then_some(()));
    assert!(tidegate.metric("tidegate_acme_challenges_total") >= 2.0);
    let status = status(&tidegate);
    let left = |certificate: &Value| {
        certificate["not_after"].as_i64().unwrap() - certificate["not_before"].as_i64().unwrap()
    };
    let certificates = status["certificates"].as_array().unwrap();
    assert_eq!(certificates.len(), 2, "{status}");
    assert!(
        certificates.iter().all(|certificate| (89..=90).contains(&(left(certificate) / 86_400))),
        "{status}"
    );
    // With a third of the life left, the next is ordered.
    let next = status["acme"][0]["next_order"].as_i64().unwrap();
    let begun = certificates[0]["not_before"].as_i64().unwrap();
    assert!((59..=60).contains(&((next - begun) / 86_400)), "{status}");
    let text = String::from_utf8(tidegate.command(&["status"]).stdout).unwrap();
    assert!(text.contains("certificate a.example: valid for 89 days"), "{text}");
    // Whoever may read the folder has the keys.
    for entry in walk(kept.path()) {
        use std::os::unix::fs::PermissionsExt;
        let mode = entry.metadata().unwrap().permissions().mode() & 0o077;
        assert_eq!(mode, 0, "{}", entry.display());
    }
    assert!(tidegate.terminate().success());
    drop(authority);
    tidegate.start();
    assert_eq!(["a.example", "b.example"].map(|name| issued(tls, name)), first.map(Some));
    eventually("both are known", || (status_of(&tidegate, "a.example").is_some()).then_some(()));
    for counter in ["tidegate_acme_failures_total", "tidegate_acme_orders_total"] {
        assert_eq!(tidegate.metric(counter), 0.0, "{counter}");
    }
}

/// What is known of a name's next certificate.
fn status_of(tidegate: &Tidegate, name: &str) -> Option<Value> {
    status(tidegate)["acme"].as_array()?.iter().find(|known| known["name"] == name).cloned()
}

fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| if path.is_dir() { [walk(&path), vec![path]].concat() } else { vec![path] })
        .collect()
}

/// The authority does not reach the listener with https: it is asked to look by a request in the clear instead, to which
/// `https_only` does not apply.
#[test]
fn authority_that_cannot_shake_hands_looks_by_a_request_in_the_clear() {
    let (tls, clear) = (loopback(), loopback());
    let authority = Authority::start(Looks { https: free_port(), http: clear.port() }, 90 * 24 * 3600);
    let kept = tempfile::tempdir().unwrap();
    let origin = Origin::start(|_| Reply::status(404, "no such token"));
    let table = authority.table(&["a.example"], kept.path());
    let builder = Tidegate::builder().origin(&origin).top("https_only = true");
    let tidegate = builder.tables(&(listen(tls, "https") + &listen(clear, "http") + &table)).start();
    eventually("a certificate", || issued(tls, "a.example"));
    assert_eq!(tidegate.metric("tidegate_acme_failures_total"), 0.0, "{}", tidegate.output());
    assert_eq!(origin.count(), 0, "no token was asked for at the origin");
    // What another program has been asked for is the upstream's.
    let mut client = tidegate_e2e::Client::connect(clear);
    assert_eq!(client.get("/.well-known/acme-challenge/token").text(), "no such token");
}

#[test]
fn certificate_is_renewed_before_it_ends() {
    let tls = loopback();
    let authority = Authority::start(Looks { https: tls.port(), http: free_port() }, 30);
    let kept = tempfile::tempdir().unwrap();
    let origin = Origin::start(|_| Reply::ok("x"));
    let table = authority.table(&["a.example"], kept.path());
    let tidegate = Tidegate::builder().origin(&origin).tables(&(listen(tls, "https") + &table)).start();
    let first = eventually("a certificate", || issued(tls, "a.example"));
    let life = |key: &str| status(&tidegate)["certificates"][0][key].as_i64().unwrap();
    let ends = life("not_after");
    let renewed = || issued(tls, "a.example").filter(|certificate| *certificate != first);
    within(Duration::from_secs(90), "another certificate", renewed);
    assert!(life("not_before") < ends, "the next one began before the first had ended");
    assert_eq!(tidegate.metric("tidegate_acme_failures_total"), 0.0, "{}", tidegate.output());
}

/// A name that is not ours has no certificate, and is said so.
#[test]
fn name_that_cannot_be_shown_to_be_ours_is_told_of_and_tried_again_at_a_reload() {
    let tls = loopback();
    let looks = Looks { https: free_port(), http: free_port() };
    let kept = tempfile::tempdir().unwrap();
    let origin = Origin::start(|_| Reply::ok("x"));
    let elsewhere = Authority::start(looks, 90 * 24 * 3600);
    let table = elsewhere.table(&["a.example"], kept.path());
    let tidegate = Tidegate::builder().origin(&origin).tables(&(listen(tls, "https") + &table)).start();
    eventually("a failure", || (tidegate.metric("tidegate_acme_failures_total") == 1.0).then_some(()));
    let said = status(&tidegate)["acme"][0]["last_error"].as_str().unwrap().to_owned();
    assert!(
        said.contains("a.example") && said.contains("tls-alpn-01") && said.contains("Failed to connect"),
        "{said}"
    );
    assert!(tidegate.output().contains(&said), "{}", tidegate.output());
    // Clients are served meanwhile, with a certificate that nobody knows.
    assert_eq!(shown(tls, "a.example", b"http/1.1").unwrap().len(), 1);
    // No client is shown what an authority would be, and none of those whose names are not being proven.
    assert!(shown(tls, "a.example", b"acme-tls/1").is_err());
    let authority = Authority::start(Looks { https: tls.port(), ..looks }, 90 * 24 * 3600);
    let mut config = std::fs::read_to_string(tidegate.config()).unwrap();
    config = config.replace(&table, &authority.table(&["a.example"], kept.path()));
    tidegate.write_config(&config);
    let reload = tidegate.command(&["reload"]);
    assert!(reload.status.success(), "{}", String::from_utf8_lossy(&reload.stderr));
    eventually("a certificate", || issued(tls, "a.example"));
}

#[test]
fn authority_that_has_forgotten_the_account_gets_a_new_one() {
    let tls = loopback();
    let looks = Looks { https: tls.port(), http: free_port() };
    let kept = tempfile::tempdir().unwrap();
    let origin = Origin::start(|_| Reply::ok("x"));
    let first = Authority::start(looks, 90 * 24 * 3600);
    let table = first.table(&["a.example"], kept.path());
    let mut tidegate = Tidegate::builder().origin(&origin).tables(&(listen(tls, "https") + &table)).start();
    eventually("a certificate", || issued(tls, "a.example"));
    tidegate.terminate();
    // Another authority, that is found in the place of the first.
    let second = Authority::start(looks, 90 * 24 * 3600);
    let config = std::fs::read_to_string(tidegate.config()).unwrap();
    let folder = |authority: &Authority| {
        let begin = authority.directory.to_string().replace(':', "_") + "-";
        let is_its =
            |path: &std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&begin);
        walk(kept.path()).into_iter().find(is_its).unwrap()
    };
    let stored = std::fs::read_to_string(folder(&first).join("account.json")).unwrap();
    tidegate.write_config(&config.replace(&table, &second.table(&["a.example"], kept.path())));
    tidegate.start();
    eventually("a certificate of the second", || issued(tls, "a.example"));
    eventually("it is kept", || folder(&second).join("a.example.pem").exists().then_some(()));
    tidegate.terminate();
    std::fs::remove_file(folder(&second).join("a.example.pem")).unwrap();
    let moved = stored.replace(&first.directory.to_string(), &second.directory.to_string());
    std::fs::write(folder(&second).join("account.json"), moved).unwrap();
    tidegate.start();
    eventually("a certificate", || issued(tls, "a.example"));
    assert!(folder(&second).join("account.json.unusable").exists());
    assert_eq!(tidegate.metric("tidegate_acme_failures_total"), 0.0, "{}", tidegate.output());
}

#[test]
fn folder_that_cannot_be_made_ends_the_start_with_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let config = directory.path().join("tidegate.toml");
    let mut text = listen(loopback(), "https");
    let _ = write!(text, "[acme]\nnames = [\"a.example\"]\npath = {:?}\n", file.join("acme"));
    text += &format!("[[route]]\nroot = {:?}\n[cache]\nmemory = \"32MiB\"\n", directory.path());
    std::fs::write(&config, text).unwrap();
    let output = Command::new(Tidegate::binary())
        .args(["run", "--admin", "127.0.0.1:0", "--config"])
        .arg(&config)
        .output();
    let output = output.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("acme.path") && said.contains("cannot keep certificates in"), "{said}");
    assert_eq!(said.lines().filter(|line| line.contains("error")).count(), 1, "{said}");
}
