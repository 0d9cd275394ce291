//! A tidegate that speaks TLS, too.

use std::io;
use std::net::SocketAddr;

use tempfile::TempDir;

use crate::{Builder, Certificate, Client, Tidegate, free_port};

/// A tidegate with a listener with TLS beside its other one.
pub struct Site {
    /// The server.
    pub tidegate: Tidegate,
    /// Where it speaks TLS.
    pub address: SocketAddr,
    /// Where its certificates are.
    pub files: TempDir,
}

impl Site {
    /// With these certificates, in files of these names and in this order.
    pub fn start(builder: Builder, certificates: &[(&str, &Certificate)]) -> Self {
        Self::listening(builder, certificates, "")
    }

    /// The same, and it speaks HTTP/3 at the UDP port of the same number.
    pub fn with_http3(builder: Builder, certificates: &[(&str, &Certificate)]) -> Self {
        Self::listening(builder, certificates, "http3 = true\n")
    }

    /// With further lines of the listener's table.
    fn listening(builder: Builder, certificates: &[(&str, &Certificate)], lines: &str) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let files = tempfile::tempdir().unwrap();
        let mut tables = format!("[[listen]]\naddress = \"{address}\"\nprotocol = \"https\"\n{lines}");
        for (name, certificate) in certificates {
            certificate.write(files.path(), name);
            let path = files.path().join(name);
            let path = path.display();
            tables += &format!("[[certificate]]\nchain = \"{path}.crt\"\nkey = \"{path}.key\"\n");
        }
        Self { tidegate: builder.tables(&tables).start(), address, files }
    }

    /// A client of HTTP/1 that trusts this certificate and asks for a.example.
    pub fn connect(&self, certificate: &Certificate) -> Client {
        self.try_connect("a.example", &[certificate]).expect("a connection with TLS")
    }

    /// A client of HTTP/1 that trusts these certificates and asks for this name.
    ///
    /// # Errors
    /// See [`Client::try_connect_tls`].
    pub fn try_connect(&self, name: &str, trusted: &[&Certificate]) -> io::Result<Client> {
        Client::try_connect_tls(self.address, name, trusted)
    }
}
