//! How each program is set up: at its best for the scenario, with one core's worth of threads and without a log.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::process::Command;

use crate::peers::{Peer, Site, free_address};
use crate::{LOAD_CORE, SERVER_CORE};

/// What nginx has in common in all of its roles.
const NGINX: &str = "access_log off; tcp_nodelay on; keepalive_requests 1000000000; default_type text/plain;";
/// haproxy refuses to start where the limit on descriptors is below twice the connections; a cache needs one for each.
const HAPROXY: &str = "global\n  nbthread 1\n  maxconn 12000\n  no strict-limits\n\
                       defaults\n  mode http\n  timeout connect 5s\n  timeout client 75s\n  timeout server 60s\n";
/// What varnishd writes to its log in shared memory for a hit.
const VARNISH_UNLOGGED: &str = "vsl_mask=-ReqHeader,-RespHeader,-ReqMethod,-ReqURL,-ReqProtocol,-RespProtocol,-RespStatus,\
     -RespReason,-VCL_call,-VCL_return,-Timestamp,-ReqAcct,-Hit,-ReqStart,-RespUnset,-ReqUnset,-Begin,-End,-Link,-Length,\
     -Filters,-SessOpen,-SessClose";

impl Peer {
    /// The limit: the bare responder. The running program must have a subcommand `bare ADDRESS SIZE_BYTES` that calls
    /// [`crate::bare::serve`].
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn bare(size_bytes: usize) -> Result<Self, String> {
        bare("bare", SERVER_CORE, size_bytes)
    }

    /// The bare responder as a web server behind a proxy, on the load's core: so the proxy has its core for itself.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn origin(size_bytes: usize) -> Result<Self, String> {
        bare("origin", LOAD_CORE, size_bytes)
    }

    /// nginx at its best: one worker, open files cached, sendfile, no log.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn nginx(site: &Site) -> Result<Self, String> {
        let address = free_address()?;
        let server = format!(
            "sendfile on; tcp_nopush off; open_file_cache max=100 inactive=1h; open_file_cache_valid 1h;\n\
             server {{ listen {address} backlog=4096; root {}; }}",
            site.directory.display()
        );
        nginx(site, address, &server)
    }

    /// As [`Self::nginx`], over TLS.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn nginx_tls(site: &Site) -> Result<Self, String> {
        let (address, certificate) = (free_address()?, site.certificate()?);
        let server = format!(
            "sendfile on; tcp_nopush off; open_file_cache max=100 inactive=1h; open_file_cache_valid 1h;\n\
             ssl_certificate {}; ssl_certificate_key {}; ssl_protocols TLSv1.2 TLSv1.3; ssl_buffer_size 16k;\n\
             server {{ listen {address} ssl http2 backlog=4096; root {}; }}",
            certificate.chain.display(),
            certificate.key.display(),
            site.directory.display()
        );
        nginx(site, address, &server).map(|peer| peer.encrypted(&certificate))
    }

    /// nginx before an upstream, whose connections it keeps.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn nginx_proxy(site: &Site, origin: SocketAddr) -> Result<Self, String> {
        let address = free_address()?;
        let server = format!(
            "upstream origin {{ server {origin}; keepalive 1024; keepalive_requests 1000000000; }}\n\
             server {{ listen {address} backlog=4096; location / {{ proxy_pass http://origin; proxy_http_version 1.1;\n\
             proxy_set_header Connection \"\"; proxy_set_header Host $host;\n\
             proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; }} }}"
        );
        nginx(site, address, &server)
    }

    /// tidegate with one data core and its default protections, except what `config` (TOML) says.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn tidegate(binary: &Path, site: &Site, config: &str) -> Result<Self, String> {
        tidegate(binary, site, config, |command| {
            command.arg("--root").arg(&site.directory);
        })
    }

    /// As [`Self::tidegate`], over TLS and by HTTP/3.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn tidegate_tls(binary: &Path, site: &Site) -> Result<Self, String> {
        let (address, admin, certificate) = (free_address()?, free_address()?, site.certificate()?);
        let config = format!(
            "workers = 1\n[admin]\naddress = \"{admin}\"\n[[listen]]\naddress = \"{address}\"\nprotocol = \"https\"\nhttp3 = true\n\
             [[certificate]]\nchain = \"{}\"\nkey = \"{}\"\n[[route]]\nroot = \"{}\"\n",
            certificate.chain.display(),
            certificate.key.display(),
            site.directory.display()
        );
        let config = site.write("tls.toml", &config)?;
        let mut command = Command::new(binary);
        command.args(["run", "--config"]).arg(config);
        Ok(Self::start("tidegate", SERVER_CORE, address, &command)?.encrypted(&certificate))
    }

    /// tidegate with one data core that serves DHTTP at the second address returned.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn tidegate_dhttp(binary: &Path, site: &Site) -> Result<(Self, SocketAddr), String> {
        let (address, admin) = (free_address()?, free_address()?);
        // Below the clients' ports, which is where the system's own choice would be.
        let dhttp = (20_000..32_768)
            .map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
            .find(|address| TcpListener::bind(address).is_ok() && UdpSocket::bind(address).is_ok())
            .ok_or("no free port")?;
        let config = format!(
            "workers = 1\n[admin]\naddress = \"{admin}\"\n[[listen]]\naddress = \"{address}\"\n[[listen]]\n\
             address = \"{dhttp}\"\nprotocol = \"dhttp\"\n[[route]]\nroot = \"{}\"\n",
            site.directory.display()
        );
        let config = site.write("dhttp.toml", &config)?;
        let mut command = Command::new(binary);
        command.args(["run", "--config"]).arg(config);
        Ok((Self::start("dhttp", SERVER_CORE, address, &command)?, dhttp))
    }

    /// tidegate before an upstream, with one data core, its cache and its default protections.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn tidegate_proxy(
        binary: &Path,
        site: &Site,
        origin: SocketAddr,
        upstream: &str,
    ) -> Result<Self, String> {
        let config = format!(
            "[[upstream]]\nname = \"origin\"\nservers = [\"{origin}\"]\nidle_connections = 1024\n{upstream}\
             [[route]]\nupstream = \"origin\"\n"
        );
        tidegate(binary, site, &config, |_| {})
    }

    /// As [`Self::tidegate_proxy`], with a cache as small as that of the limited others.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn tidegate_limited_proxy(binary: &Path, site: &Site, origin: SocketAddr) -> Result<Self, String> {
        let config = format!(
            "[cache]\nmemory = \"16MiB\"\n[[upstream]]\nname = \"origin\"\nservers = [\"{origin}\"]\n\
             [[route]]\nupstream = \"origin\"\n"
        );
        tidegate(binary, site, &config, |_| {})
    }

    /// haproxy with one thread and its cache before an origin.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn haproxy(site: &Site, origin: SocketAddr) -> Result<Self, String> {
        let address = free_address()?;
        let proxy = format!(
            "cache objects\n  total-max-size 64\n  max-object-size 1048576\n  max-age 3600\n\
             frontend clients\n  bind {address} backlog 4096\n  http-request cache-use objects\n\
             \x20 http-response set-header Cache-Control max-age=3600\n  http-response cache-store objects\n\
             \x20 default_backend origin\nbackend origin\n  server origin {origin}\n"
        );
        haproxy(site, address, &proxy)
    }

    /// As [`Self::haproxy`], over TLS.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn haproxy_tls(site: &Site, origin: SocketAddr) -> Result<Self, String> {
        let (address, certificate) = (free_address()?, site.certificate()?);
        let proxy = format!(
            "cache objects\n  total-max-size 64\n  max-object-size 1048576\n  max-age 3600\n\
             frontend clients\n  bind {address} ssl crt {} alpn h2,http/1.1 backlog 4096\n  http-request cache-use objects\n\
             \x20 http-response set-header Cache-Control max-age=3600\n  http-response cache-store objects\n\
             \x20 default_backend origin\nbackend origin\n  server origin {origin}\n",
            certificate.both.display()
        );
        haproxy(site, address, &proxy).map(|peer| peer.encrypted(&certificate))
    }

    /// haproxy with one thread before an upstream, whose connections it keeps; without a cache.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn haproxy_proxy(site: &Site, origin: SocketAddr) -> Result<Self, String> {
        let address = free_address()?;
        let proxy = format!(
            "frontend clients\n  bind {address} backlog 4096\n  option forwardfor\n  default_backend origin\n\
             backend origin\n  http-reuse always\n  server origin {origin}\n"
        );
        haproxy(site, address, &proxy)
    }

    /// nginx with the limits that its manual recommends against floods, set so that the offices behind one address are
    /// let pass: 100 requests a second with a burst of 200, and 100 connections, for each address.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn nginx_limited(site: &Site) -> Result<Self, String> {
        let address = free_address()?;
        let server = format!(
            "sendfile on; open_file_cache max=100 inactive=1h; open_file_cache_valid 1h; client_header_timeout 10s;\n\
             limit_req_zone $binary_remote_addr zone=requests:64m rate=100r/s; limit_req_status 429;\n\
             limit_conn_zone $binary_remote_addr zone=connections:64m;\n\
             server {{ listen {address} backlog=4096; root {}; limit_req zone=requests burst=200 nodelay;\n\
             limit_conn connections 100; }}",
            site.directory.display()
        );
        nginx(site, address, &server)
    }

    /// As [`Self::nginx_limited`], with a cache before an origin.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn nginx_limited_proxy(site: &Site, origin: SocketAddr) -> Result<Self, String> {
        let address = free_address()?;
        let root = site.directory.display();
        let server = format!(
            "client_header_timeout 10s; proxy_cache_path {root}/cache keys_zone=objects:16m max_size=16m;\n\
             limit_req_zone $binary_remote_addr zone=requests:64m rate=100r/s; limit_req_status 429;\n\
             limit_conn_zone $binary_remote_addr zone=connections:64m;\n\
             upstream origin {{ server {origin}; keepalive 1024; }}\n\
             server {{ listen {address} backlog=4096; limit_req zone=requests burst=200 nodelay;\n\
             limit_conn connections 100; location / {{ proxy_pass http://origin; proxy_http_version 1.1;\n\
             proxy_set_header Connection \"\"; proxy_set_header Host $host; proxy_cache objects; }} }}"
        );
        nginx(site, address, &server)
    }

    /// haproxy with a stick table, its cache before an origin, and limits like those of [`Self::nginx_limited`].
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn haproxy_limited(site: &Site, origin: SocketAddr) -> Result<Self, String> {
        let address = free_address()?;
        let proxy = format!(
            "cache objects\n  total-max-size 16\n  max-object-size 1048576\n  max-age 3600\n\
             frontend clients\n  bind {address} backlog 4096\n  timeout http-request 10s\n\
             \x20 stick-table type ip size 200k expire 10m store http_req_rate(10s),conn_cur\n\
             \x20 tcp-request connection track-sc0 src\n\
             \x20 tcp-request connection reject if {{ sc0_conn_cur gt 100 }}\n\
             \x20 http-request deny deny_status 429 if {{ sc0_http_req_rate gt 1000 }}\n\
             \x20 http-request cache-use objects\n\
             \x20 http-response set-header Cache-Control max-age=3600\n  http-response cache-store objects\n\
             \x20 default_backend origin\nbackend origin\n  server origin {origin}\n"
        );
        // Slow clients hold more connections than other scenarios open.
        haproxy_with(site, address, &HAPROXY.replace("12000", "16000"), &proxy)
    }

    /// caddy with a directory of files, over TLS and by HTTP/3.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn caddy(site: &Site) -> Result<Self, String> {
        let (address, certificate) = (free_address()?, site.certificate()?);
        let config = format!(
            "{{\n  admin off\n  auto_https off\n  default_sni localhost\n}}\n:{} {{\n  bind {}\n  tls {} {}\n\
             \x20 root * {}\n  file_server\n}}\n",
            address.port(),
            address.ip(),
            certificate.chain.display(),
            certificate.key.display(),
            site.directory.display()
        );
        let config = site.write("Caddyfile", &config)?;
        let mut command = Command::new("caddy");
        command.args(["run", "--adapter", "caddyfile", "--config"]).arg(config);
        Ok(Self::start("caddy", SERVER_CORE, address, &command)?.encrypted(&certificate))
    }

    /// varnishd with its cache in memory before an origin.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn varnish(site: &Site, origin: SocketAddr) -> Result<Self, String> {
        varnish(site, origin, "sub vcl_backend_response { set beresp.ttl = 1h; }\n")
    }

    /// varnishd that hands every request to an upstream, whose connections it keeps.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn varnish_proxy(site: &Site, origin: SocketAddr) -> Result<Self, String> {
        varnish(site, origin, "sub vcl_recv { return (pass); }\n")
    }
}

fn bare(name: &'static str, core: usize, size_bytes: usize) -> Result<Peer, String> {
    let address = free_address()?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.args(["bare", &address.to_string(), &size_bytes.to_string()]);
    Peer::start(name, core, address, &command)
}

fn nginx(site: &Site, address: SocketAddr, server: &str) -> Result<Peer, String> {
    let root = site.directory.display();
    let config = site.write(
        "nginx.conf",
        &format!(
            "daemon off; master_process off; worker_processes 1; worker_rlimit_nofile 20000;\n\
             pid {root}/nginx.pid; error_log {root}/nginx.err crit; events {{ worker_connections 16000; }}\n\
             http {{ {NGINX}\n{server} }}\n"
        ),
    )?;
    let mut command = Command::new("nginx");
    command.arg("-c").arg(config);
    Peer::start("nginx", SERVER_CORE, address, &command)
}

fn tidegate(
    binary: &Path,
    site: &Site,
    config: &str,
    also: impl FnOnce(&mut Command),
) -> Result<Peer, String> {
    let (address, admin) = (free_address()?, free_address()?);
    let config = site.write("tidegate.toml", config)?;
    let mut command = Command::new(binary);
    command.args(["run", "--workers", "1", "--config"]).arg(config);
    command.args(["--listen", &address.to_string(), "--admin", &admin.to_string()]);
    also(&mut command);
    Peer::start("tidegate", SERVER_CORE, address, &command)
}

fn haproxy(site: &Site, address: SocketAddr, proxy: &str) -> Result<Peer, String> {
    haproxy_with(site, address, HAPROXY, proxy)
}

fn haproxy_with(site: &Site, address: SocketAddr, common: &str, proxy: &str) -> Result<Peer, String> {
    let config = site.write("haproxy.cfg", &format!("{common}{proxy}"))?;
    let mut command = Command::new("haproxy");
    command.args(["-db", "-q", "-f"]).arg(config);
    Peer::start("haproxy", SERVER_CORE, address, &command)
}

fn varnish(site: &Site, origin: SocketAddr, rules: &str) -> Result<Peer, String> {
    let address = free_address()?;
    let backend =
        format!("backend default {{ .host = \"{}\"; .port = \"{}\"; }}", origin.ip(), origin.port());
    let config = site.write("varnish.vcl", &format!("vcl 4.1;\n{backend}\n{rules}"))?;
    let mut command = Command::new("varnishd");
    // In the foreground and as the user who started it: its directory is ours.
    command.args(["-F", "-j", "none", "-s", "malloc,256m", "-a", &address.to_string(), "-f"]).arg(config);
    command.arg("-n").arg(site.directory.join("varnish"));
    for parameter in [
        "thread_pools=1",
        "thread_pool_min=600",
        "thread_pool_max=5000",
        // Sessions wait for a thread instead of being dropped.
        "thread_queue_limit=20000",
        "listen_depth=4096",
        "timeout_idle=75",
        VARNISH_UNLOGGED,
    ] {
        command.args(["-p", parameter]);
    }
    Peer::start("varnish", SERVER_CORE, address, &command).map(Peer::forking)
}
