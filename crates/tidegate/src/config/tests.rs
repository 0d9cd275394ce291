use proptest::prelude::*;
use tidegate_accelerator::settings::{Cache, Limits, ServerAddress, TlsServer, Upstream};

mod documents;
mod routes;
mod samples;

use super::keys::{FILE, Fallback};
use super::*;

const UPSTREAM: &str = "[[upstream]]\nname = \"app\"\nservers = [\"127.0.0.1:9000\"]\n";

fn errors(text: &str) -> Vec<String> {
    parse("t.toml", text).err().unwrap_or_default().iter().map(Finding::to_string).collect()
}

#[track_caller]
fn accepted(text: &str) -> Loaded {
    parse("t.toml", text).unwrap_or_else(|findings| panic!("{}\n{text}", lines(&findings)))
}

fn warnings(text: &str) -> Vec<String> {
    accepted(text).warnings.iter().map(Finding::to_string).collect()
}

#[test]
fn every_error_of_a_file_is_reported_at_once_in_its_order() {
    let text = "\
personality = \"strickt\"
workers = 0
colour = \"blue\"

[[listen]]
address = 8080
protocol = \"htps\"

[[upstream]]
name = \"app\"
servers = [\"127.0.0.1:9000\", \"https://127.0.0.1/app\", 7]
ballance = \"round-robin\"
max_connections = 0

[[route]]
host = \"*\"

[[route]]
upstream = \"ap\"

[cache]
memory = \"1KiB\"

[limits]
header_timeout = 10
fields = 0
connections = -1

[stress]
memory = 9.0

[[connection]]
source = \"10.1.1.0/40\"
";
    let expected = [
        "t.toml:1:15: personality: expected \"strict\", \"apache\", \"nginx\" or \"iis\", not \"strickt\"; did you \
         mean \"strict\"?",
        "t.toml:2:11: workers: expected an integer from 1 to 1024, not 0",
        "t.toml:3:1: colour: unknown key in the file, expected one of workers, personality, trusted_proxies, \
         pseudonym, https_only, listen, certificate, acme, admin, upstream, route, cache, compression, limits, log, connection, request, block, \
         defence, classifier, exempt, filter, icap, gate, adapt, stress",
        "t.toml:6:11: listen.address: expected ADDRESS:PORT or :PORT, not 8080",
        "t.toml:7:12: listen.protocol: expected \"http\", \"https\", \"dhttp\" or \"trickles\", not \"htps\"; did you mean \"https\"?",
        "t.toml:11:30: upstream.servers: expected HOST:PORT, http://HOST:PORT, https://HOST:PORT or \
         unix:/PATH without a path of a URL, not \"https://127.0.0.1/app\"",
        "t.toml:11:55: upstream.servers: expected HOST:PORT, http://HOST:PORT, https://HOST:PORT or unix:/PATH, not 7",
        "t.toml:12:1: upstream.ballance: unknown key in [[upstream]], expected one of name, servers, require, balance, \
         connect_timeout, response_timeout, idle_timeout, idle_connections, max_connections, http2, pipeline, \
         pipeline_timeout, max_failures, fail_timeout, health_check, tls; did you mean \"balance\"?",
        "t.toml:13:19: upstream.max_connections: expected an integer from 1 to 65535, not 0",
        "t.toml:15:1: route: missing upstream, root or redirect, expected one of them",
        "t.toml:19:12: route.upstream: there is no [[upstream]] named \"ap\"; did you mean \"app\"?",
        "t.toml:22:10: cache.memory: expected 0B or a size from 1MiB to 512GiB, such as \"64KiB\" or \"256MiB\", \
         not \"1KiB\"",
        "t.toml:25:18: limits.header_timeout: expected a duration from 10ms to 1d, such as \"10s\", \"500ms\" \
         or \"10m\", not 10",
        "t.toml:26:10: limits.fields: expected an integer from 1 to 10000, not 0",
        "t.toml:27:15: limits.connections: expected an integer from 1 to 10000000, not -1",
        "t.toml:30:10: stress.memory: expected a number above 0 and at most 1, such as 0.9, not 9.0",
        "t.toml:33:10: connection.source: expected an address or a prefix such as \"10.1.0.0/16\", \
         not \"10.1.1.0/40\": prefix length is not a number from 0 to 32",
    ];
    assert_eq!(errors(text), expected);
}

#[test]
fn errors_say_where_what_and_what_was_meant() {
    let with_upstream = |text: &str| format!("{UPSTREAM}{text}");
    for (text, wanted) in [
        ("[cache]\nmemory = \"0MiBs\"\n".to_owned(), "t.toml:2:10: cache.memory: expected 0B or a size"),
        ("[limits]\nbody_size = \"0B\"\n".into(), "t.toml:2:13: limits.body_size: expected a size from 1B"),
        (
            "[limits]\ndrain_timeout = \"0s\"\n".into(),
            "t.toml:2:17: limits.drain_timeout: expected a duration",
        ),
        ("header_timeout = \"10s\"\n".into(), "t.toml:1:1: header_timeout: unknown key in the file"),
        (
            "[listen]\naddress = \":1\"\n".into(),
            "t.toml:1:2: listen: expected a list of tables: write [[listen]], not a table",
        ),
        (
            "[[cache]]\nmemory = \"1MiB\"\n".into(),
            "t.toml:1:3: cache: expected a table: write [cache], not a list",
        ),
        (
            "upstream = \"app\"\n".into(),
            "t.toml:1:12: upstream: expected a list of tables: write [[upstream]], not \"app\"",
        ),
        ("listen = [1]\n".into(), "t.toml:1:11: listen: expected a list of tables: write [[listen]], not 1"),
        ("[[listen]]\n".into(), "t.toml:1:1: listen.address: missing; expected ADDRESS:PORT or :PORT"),
        (
            "[[upstream]]\nname = \"a\"\nservers = []\n".into(),
            "t.toml:3:11: upstream.servers: expected at least 1 of HOST:PORT",
        ),
        (
            "[[upstream]]\nname = \"a b\"\nservers = [\"127.0.0.1:1\"]\n".into(),
            "t.toml:2:8: upstream.name: expected a name",
        ),
        (
            "[[upstream]]\nname = \"a\"\nservers = [\"127.0.0.1:1\"]\nhealth_check = { interval = \"1s\" }\n"
                .into(),
            "t.toml:4:16: upstream.health_check.path: missing; expected a path that begins with \"/\"",
        ),
        (
            with_upstream("http2 = true\npipeline = 8\n"),
            "t.toml:5:12: upstream.pipeline: by HTTP/2 no request waits for another, and is not sent behind it",
        ),
        (
            with_upstream("[[filter]]\npath = \"/%61dmin\"\n"),
            "t.toml:5:8: filter.path: \"/%61dmin\" never matches: paths are compared in their normal form; \
             write \"/admin\"",
        ),
        (
            with_upstream(
                "[[icap]]\non = \"requests\"\nservice = \"icap://127.0.0.1/x\"\npaths = [\"*a\", \"//x/*\"]\n",
            ),
            "t.toml:7:16: icap.paths: \"//x/*\" never matches: paths are compared in their normal form; write \"/x/*\"",
        ),
        (
            with_upstream(UPSTREAM),
            "t.toml:5:8: upstream.name: \"app\" is the name of the [[upstream]] in line 2 already",
        ),
        (
            "[[route]]\nroot = \"/does/not/exist\"\n".into(),
            "t.toml:2:8: route.root: expected a readable directory, but /does/not/exist: No such file",
        ),
        (
            "[[listen]]\naddress = \"[::]:80\"\n[[listen]]\naddress = \"0.0.0.0:80\"\n".into(),
            "t.toml:4:11: listen.address: \"0.0.0.0:80\" overlaps \"[::]:80\"",
        ),
        ("[[request]]\nrate = 1\n".into(), "t.toml:1:1: request: expected at least one of path and cookie"),
        (
            "[[request]]\npath = \"/\"\naction = \"explode\"\n".into(),
            "t.toml:3:10: request.action: expected \"drop\", \"reset\" or \"refuse\"",
        ),
        (
            "[[request]]\ncookie = { tier = 1 }\n".into(),
            "t.toml:2:10: request.cookie: expected a text for tier, not 1",
        ),
        (
            "[[connection]]\ndestination = \"somewhere\"\n".into(),
            "t.toml:2:15: connection.destination: expected ADDRESS:PORT",
        ),
        (
            "[[connection]]\ndestination = \"*:0\"\n".into(),
            "t.toml:2:15: connection.destination: expected ADDRESS:PORT such as \"*:80\", not \"*:0\": no connection \
             comes to port 0",
        ),
        (
            "[[request]]\npath = \"/x?a=b\"\n".into(),
            "t.toml:2:8: request.path: expected a path of visible ASCII characters, without a query",
        ),
        (
            "[[request]]\npath = \"/x y\"\n".into(),
            "t.toml:2:8: request.path: expected a path of visible ASCII characters, without a query",
        ),
        (
            "[[request]]\npath = \"x\"\n".into(),
            "t.toml:2:8: request.path: expected a path that begins with \"/\" or \"*\"",
        ),
        ("[stress]\nmemory = 0\n".into(), "t.toml:2:10: stress.memory: expected a number above 0"),
        ("[stress]\nmemory = nan\n".into(), "t.toml:2:10: stress.memory: expected a number above 0"),
        (
            "[cache]\nmemory = \"1MiB\"\nmax_object = \"2MiB\"\n".into(),
            "t.toml:3:14: cache.max_object: expected at most cache.memory",
        ),
        (
            "[limits]\nhead_size = \"1KiB\"\nrequest_line_size = \"2KiB\"\n".into(),
            "t.toml:3:21: limits.request_line_size: expected at most",
        ),
        (
            "[[listen]]\naddress = 127.0.0.1:18080\n".into(),
            "t.toml:2:16: listen.address: expected ADDRESS:PORT or :PORT, not 127.0.0.1:18080; put the value \
             in \"quotes\"",
        ),
        (
            "[cache]\nmemory = \"1MiB\"\nmemory = \"2MiB\"\n".into(),
            "t.toml:3:1: cache.memory: duplicate key, first in line 2",
        ),
        (
            "[log]\naccess = \"/tmp\"\n".into(),
            "t.toml:2:10: log.access: expected a file, but /tmp is a directory",
        ),
        (
            "[cache]\npath = \"/etc/passwd\"\n".into(),
            "t.toml:2:8: cache.path: expected a directory, but /etc/passwd is a file",
        ),
        ("\"é\" = 1\n".into(), "t.toml:1:1: é: unknown key"),
        ("personality = \"é\" # \nworkers = 'x'".into(), "t.toml:1:15: personality: expected"),
    ] {
        let found = errors(&text);
        assert!(found.first().is_some_and(|error| error.starts_with(wanted)), "{text}\n{found:#?}\n{wanted}");
    }
    assert!(errors("header_timeout = \"10s\"\n")[0].ends_with("; it is a key of [limits]"));
}

#[test]
fn a_file_that_is_not_toml_every_broken_line_is_reported_and_what_stands_before_is_judged() {
    let text = "wrokers = 1\n[[upstream]]\nname = app\nservers = [\"127.0.0.1:1\"]\nname = \"b\"\n[limits]\n\
                fields = 0\n";
    assert_eq!(
        errors(text).iter().map(|error| &error[..error.len().min(42)]).collect::<Vec<_>>(),
        [
            "t.toml:1:1: wrokers: unknown key in the fi",
            "t.toml:3:8: upstream.name: expected a name",
            "t.toml:5:1: upstream.name: duplicate key, ",
            "t.toml:7:10: limits.fields: expected an in",
        ]
    );
    // After an unclosed header the parser's guess is worth nothing: only what stands before it is judged.
    let found = errors("wrokers = 1\n[[listen]\naddress = \":1\"\n[limits]\nfields = 0\n");
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(found[1].starts_with("t.toml:2:10: unclosed"), "{found:#?}");
}

#[test]
fn what_is_no_value_is_answered_by_what_is_expected() {
    let integer = "expected an integer from 1 to 64, ";
    for (line, wanted) in [
        ("pipeline =", format!("4:11: upstream.pipeline: {integer}found nothing")),
        ("pipeline = # some", format!("4:12: upstream.pipeline: {integer}found nothing")),
        ("pipeline = ten", format!("4:12: upstream.pipeline: {integer}not ten")),
        ("pipeline = 08", format!("4:12: upstream.pipeline: {integer}not 08")),
        ("require = yes", "4:11: upstream.require: expected true or false, not yes".into()),
        ("require = True", "4:11: upstream.require: expected true or false, not True".into()),
        (
            "health_check =",
            "4:15: upstream.health_check: expected a table: write [upstream.health_check], found nothing".into(),
        ),
        (
            "health_check = { path = \"/\", interval = 10s }",
            "4:41: upstream.health_check.interval: expected a duration from 10ms to 1d, such as \"10s\", \"500ms\" \
             or \"10m\", not 10s; put the value in \"quotes\""
                .into(),
        ),
        (
            "balance =",
            "4:10: upstream.balance: expected \"round-robin\", \"least-connections\", \"hash-url\" or \"hash-host\", \
             found nothing; put the value in \"quotes\"".into(),
        ),
        (
            "[stress]\nmemory = 90%",
            "5:10: stress.memory: expected a number above 0 and at most 1, such as 0.9, not 90%".into(),
        ),
        (
            "[[listen]]\naddress = ",
            "5:11: listen.address: expected ADDRESS:PORT or :PORT, found nothing; put the value in \"quotes\"".into(),
        ),
        ("colour =", "4:9: upstream.colour: expected a value, found nothing".into()),
        ("[limits]\nfields =", "5:9: limits.fields: expected an integer from 1 to 10000, found nothing".into()),
    ] {
        // What stands behind is judged all the same.
        let found = errors(&format!("{UPSTREAM}{line}\n[log]\nformat = \"xml\"\n"));
        assert_eq!(found.len(), 2, "{line}: {found:#?}");
        assert_eq!(found[0], format!("t.toml:{wanted}"), "{line}");
        assert!(found[1].contains("log.format: expected"), "{line}: {found:#?}");
    }
    let list = errors("trusted_proxies = 10.0.0.0/8\n");
    assert_eq!(list.len(), 1, "{list:#?}");
    assert!(list[0].ends_with("not 10.0.0.0/8; write [\"10.0.0.0/8\"]"), "{list:#?}");
}

#[test]
fn what_is_open_or_lacks_quotes_within_a_list_is_named() {
    let upstream = |lines: &str| errors(&format!("[[upstream]]\n{lines}\n[[route]]\nupstream = \"a\"\n"));
    for (lines, wanted) in [
        (
            "name = \"a\"\nservers = [\"127.0.0.1:1\", 127.0.0.1:2]",
            "t.toml:3:32: upstream.servers: expected HOST:PORT, http://HOST:PORT, https://HOST:PORT or unix:/PATH, not 127.0.0.1:2; put the value \
             in \"quotes\"",
        ),
        (
            "servers = [\"127.0.0.1:1\"]\nname = \"a",
            "t.toml:3:10: upstream.name: invalid basic string, expected `\"`; the text has no closing quote",
        ),
        (
            "name = \"a\"\nservers = [\"127.0.0.1:1\"",
            "t.toml:4:1: missing comma between array elements, expected `,`; is the ] of the list before it missing?",
        ),
    ] {
        let found = upstream(lines);
        assert_eq!(found.first().map(String::as_str), Some(wanted), "{lines}: {found:#?}");
    }
}

#[test]
fn a_file_with_very_many_errors_names_the_first_and_counts_the_rest() {
    let text = "wrong = 1\n".repeat(20_000) + &"[[listen]]\n".repeat(20_000);
    let found = errors(&text);
    assert_eq!(found.len(), 101);
    assert_eq!(found[0], "t.toml:2:1: wrong: duplicate key, first in line 1");
    assert!(found[100].starts_with("t.toml: and ") && found[100].ends_with(" more errors"), "{}", found[100]);
    let many = "[[route]]\nupstream = \"app\"\npath = \"/@\"\n";
    let text: String = (0..5000).map(|number| many.replace('@', &number.to_string())).collect();
    assert_eq!(accepted(&(UPSTREAM.to_owned() + &text)).settings.routes.len(), 5000);
}

#[test]
fn what_has_no_effect_is_warned_of() {
    let text = "[[request]]\npath = \"/cgi-bin/*\"\nrate = 10\nburst = 2\npriority = 3\n\
                [[request]]\ncookie = { tier = \"gold\" }\npriority = 1\n[[request]]\npath = \"*noaccess*\"\n\
                action = \"reset\"\n\
                [[connection]]\ndestination = \"*:80\"\nsource = \"10.1.1.0/24\"\nrate = 100\nburst = 5\npriority = 2\n\
                [block]\nfor = \"10m\"\npath = \"/var/lib/tidegate/block\"\n[stress]\nmemory = 0.9\n\
                queue_delay = \"50ms\"\n";
    assert_eq!(warnings(text), [] as [String; 0]);
    assert_eq!(
        warnings("[log]\nformat = \"json\"\n"),
        ["t.toml:2:10: log.format has no effect without log.access"]
    );
    assert_eq!(
        warnings("[cache]\nmemory = \"0B\"\npath = \"/tmp\"\n"),
        ["t.toml:3:8: cache.path has no effect: the cache is off"]
    );
    assert_eq!(warnings(UPSTREAM), ["t.toml:2:8: no [[route]] uses the upstream \"app\""]);
    assert_eq!(warnings("[admin]\naddress = \"0.0.0.0:1\"\n").len(), 1);
    assert_eq!(warnings(&format!("{UPSTREAM}[[route]]\nupstream = \"app\"\n")), [] as [String; 0]);
}

#[test]
fn rules_mean_what_they_say() {
    let text = "[[request]]\npath = \"/cgi-bin/*\"\nrate = 10\nburst = 2\npriority = 3\n\
                [[request]]\ncookie = { tier = \"gold\" }\npriority = 1\n[[request]]\npath = \"*noaccess*\"\n\
                action = \"reset\"\n\
                [[connection]]\ndestination = \"*:80\"\nsource = \"10.1.1.0/24\"\nrate = 0.5\npriority = 2\n\
                when = \"overload\"\n\
                [[connection]]\n[gate]\nhttp_ports = [\"80\", \"8000-8099\"]\nhold_depth = 5\n";
    let gate = accepted(text).gate;
    let rules: Vec<String> = gate.rules.requests.iter().map(ToString::to_string).collect();
    assert_eq!(
        rules,
        ["/cgi-bin/* rate=10 burst=2 reset priority=3", "* cookie tier=gold priority=1", "*noaccess* reset"]
    );
    let rules: Vec<String> = gate.rules.connections.iter().map(ToString::to_string).collect();
    assert_eq!(rules, ["*:80 from 10.1.1.0/24 rate=0.5 burst=1 on overload priority=2", "*:* from *"]);
    assert_eq!(gate.http_ports.map(|ports| ports.len()), Some(2));
    assert_eq!(gate.options.hold_depth, Some(5));
    assert!(gate.is_configured && !accepted("").gate.is_configured);
    assert_eq!(warnings("[[connection]]\nburst = 1\n").len(), 1);
    let to = |text: &str| warnings(&format!("[[connection]]\ndestination = \"{text}\"\n"));
    let [forgotten] = to("fd44::1:80").try_into().unwrap();
    assert!(forgotten.contains("write \"[fd44::1]:80\" for port 80"), "{forgotten}");
    for meant in ["[fd44::1]:80", "[fd44::1:80]:*", "fd44::1:80/128", "fd44::80", "::1", "10.0.0.1:80", "*"] {
        assert_eq!(to(meant), [] as [String; 0], "{meant}");
    }
    assert_eq!(warnings("[[connection]]\nrate = 1\nwhen = \"overload\"\n"), [] as [String; 0]);
    let stress = accepted("[stress]\nmemory = 0.5\nqueue_delay = \"70ms\"\n").gate.wanted.stress;
    assert_eq!((stress.memory, stress.queue_delay.as_millis()), (0.5, 70));
    let folded = accepted("personality = \"iis\"\n[[request]]\npath = \"/Cgi/*\"\nrate = 1\n").gate.rules;
    assert_eq!(folded.requests[0].path.to_string(), "/cgi/*");
    for (text, wanted) in [
        ("[[request]]\npath = \"/a/../b\"\n", "t.toml:2:8: request.path: \"/a/../b\" never matches"),
        ("[[request]]\npath = \"/a*b\"\n", "t.toml:2:8: request.path: a star may stand at the beginning"),
        (
            "[[request]]\ncookie = { a = \"b\", c = \"d\" }\n",
            "t.toml:2:10: request.cookie: expected one cookie",
        ),
        ("[[request]]\ncookie = { a = \"b;c\" }\n", "t.toml:2:10: request.cookie: a cookie's value"),
        ("[[connection]]\nrate = 0.0001\n", "t.toml:2:8: connection.rate: rate 0.0001 is not between"),
        ("[[connection]]\nrate = -1\n", "t.toml:2:8: connection.rate: expected a number from 0 to"),
        (
            "[[connection]]\npriority = 9\n",
            "t.toml:2:12: connection.priority: expected an integer from 1 to 8",
        ),
        (
            "[[connection]]\nsource = \"::1\"\ndestination = \"10.0.0.1:80\"\n",
            "t.toml:1:1: connection: rule 10.0.0.1/32:80 from ::1/128: source and destination",
        ),
        (
            "[gate]\nhttp_ports = [\"80-\"]\n",
            "t.toml:2:15: gate.http_ports: expected a port or a range of ports",
        ),
    ] {
        let found = errors(text);
        assert!(found.first().is_some_and(|error| error.starts_with(wanted)), "{text}\n{found:#?}\n{wanted}");
    }
}

#[test]
fn nowhere_to_listen_and_nothing_to_serve_are_missing() {
    let missing = |text: &str| still_missing(&accepted(text), Some(Path::new("t.toml"))).len();
    assert_eq!(missing(""), 2);
    assert_eq!(missing("[[listen]]\naddress = \":1\"\n"), 1);
    assert_eq!(
        missing(&format!("[[listen]]\naddress = \":1\"\n{UPSTREAM}[[route]]\nupstream = \"app\"\n")),
        0
    );
}

#[test]
fn every_default_is_valid() {
    for section in FILE.walk() {
        for key in section.keys {
            if let Fallback::Is(text) = key.default {
                assert!(key.kind.read_default(text).is_ok(), "{}", section.path_of(key.name));
            }
        }
    }
}

#[test]
fn defaults_of_the_table_are_those_of_the_engine() {
    let loaded = accepted(UPSTREAM);
    let server: std::net::SocketAddr = "127.0.0.1:9000".parse().unwrap();
    assert_eq!(loaded.settings.upstreams, [Upstream::new("app", vec![server])]);
    assert_eq!(loaded.settings.cache, Cache::default());
    assert_eq!(format!("{:?}", loaded.settings.limits), format!("{:?}", Limits::default()));
    assert_eq!(loaded.admin.address, "127.0.0.1:9090".parse().unwrap());
    assert_eq!(format!("{:?}", defaults()), format!("{:?}", accepted("")));
}

#[test]
fn a_group_is_required_at_the_start_unless_it_says_otherwise_or_is_unused() {
    let route = "[[route]]\nupstream = \"app\"\n";
    assert_eq!(accepted(&format!("{UPSTREAM}{route}")).required, ["app"]);
    assert!(accepted(&format!("{UPSTREAM}require = false\n{route}")).required.is_empty());
    assert!(accepted(UPSTREAM).required.is_empty());
}

#[test]
fn server_name_that_is_not_known_stops_a_required_group_only() {
    let route = "[[route]]\nupstream = \"app\"\n";
    let unknown = UPSTREAM.replace("127.0.0.1", "app.invalid");
    let errors = parse("t.toml", &format!("{unknown}{route}")).unwrap_err();
    assert!(
        lines(&errors).starts_with("t.toml:3:12: upstream.servers: cannot resolve \"app.invalid\""),
        "{errors:?}"
    );
    let optional = accepted(&format!("{unknown}require = false\n{route}"));
    assert!(optional.settings.upstreams[0].servers.is_empty());
    assert!(
        lines(&optional.warnings).contains("it gets no requests before a reload"),
        "{:?}",
        optional.warnings
    );
}

#[test]
fn all_addresses_of_a_server_name_become_servers() {
    use std::net::ToSocketAddrs;
    let text = UPSTREAM.replace("127.0.0.1", "localhost");
    let mut expected: Vec<_> = ("localhost", 9000).to_socket_addrs().unwrap().map(Into::into).collect();
    expected.dedup();
    assert_eq!(accepted(&text).settings.upstreams[0].servers, expected);
}

#[test]
fn a_file_that_cannot_be_a_configuration_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("t.toml");
    let error = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        let findings = load(&file).unwrap_err();
        findings[0].to_string().replace(&file.display().to_string(), "t.toml")
    };
    assert_eq!(error(b"workers = 1\n# \xff\n"), "t.toml:2:3: expected UTF-8 text");
    assert_eq!(error(&vec![b'#'; (4 << 20) + 1]), "t.toml: larger than 4 MiB: this is no configuration");
    let missing = load(&directory.path().join("none.toml")).unwrap_err()[0].to_string();
    assert!(missing.contains("none.toml: cannot read the configuration: No such file"), "{missing}");
}

proptest! {
    /// An operator's typing never ends in a panic, and each error has a place within the file.
    #[test]
    fn a_file_with_lines_changed_at_random_is_judged(
        cuts in prop::collection::vec((0..2000_usize, "[\\[\\]=\"{}.a-z0-9\n ,é-]{0,6}"), 1..6),
    ) {
        let text = std::fs::read_to_string(tidegate_e2e::project().join("examples/tidegate.toml")).unwrap();
        // Without servers: changed at random, an address becomes a name, and asks a name server.
        let mut text = text.replace("servers", "proxies");
        for (at, insert) in cuts {
            let at = (0..=at % text.len()).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            let end = text[at..].char_indices().nth(3).map_or(text.len(), |(offset, _)| at + offset);
            text.replace_range(at..end, &insert);
        }
        for finding in parse("t.toml", &text).err().unwrap_or_default() {
            let (line, column) = finding.place.unwrap();
            prop_assert!(line <= text.lines().count() + 1 && column >= 1, "{finding}\n{text}");
        }
    }
}

#[test]
fn what_means_something_else_than_it_looks_like_is_warned_of() {
    let text = "trusted_proxies = [\"10.0.0.1/8\", \"192.0.2.1\", \"10.0.0.0/8\"]\n";
    assert_eq!(warnings(text), ["t.toml:1:20: trusted_proxies: \"10.0.0.1/8\" means 10.0.0.0/8, all of it"]);
    let twice = "[[upstream]]\nname = \"a\"\nservers = [\"127.0.0.1:1\", \"127.0.0.1:1\"]\n[[route]]\n\
                 upstream = \"a\"\n";
    let found = warnings(twice);
    assert!(found.len() == 1 && found[0].contains("127.0.0.1:1 is listed twice"), "{found:?}");
}

#[test]
fn actions_that_a_classifier_cannot_do_are_refused_or_warned_of() {
    let text =
        |name: &str, action: &str| format!("[[classifier]]\nname = \"{name}\"\naction = \"{action}\"\n");
    for name in ["connection-rate", "connections"] {
        for action in ["delay", "refuse", "challenge", "tarpit"] {
            let findings = parse("t.toml", &text(name, action)).unwrap_err();
            assert!(lines(&findings).contains("takes a request"), "{}", lines(&findings));
        }
        for action in ["reset", "drop", "block"] {
            assert!(parse("t.toml", &text(name, action)).is_ok(), "{name} {action}");
        }
    }
    let about =
        |text: &str| warnings(text).into_iter().filter(|line| line.contains("classifier.action")).count();
    assert_eq!((about(&text("slow", "refuse")), about(&text("slow", "block"))), (1, 0));
}

#[test]
fn https_only_needs_somebody_who_speaks_it() {
    let clear = "https_only = true\n[[listen]]\naddress = \":80\"\n";
    let expected = "t.toml:1:14: https_only: nothing here speaks https; add a [[listen]] with protocol = \"https\", or name \
                    the proxy that does in trusted_proxies";
    assert_eq!(errors(clear), [expected]);
    let secure = format!("{clear}[[listen]]\naddress = \":443\"\nprotocol = \"https\"\n");
    assert!(accepted(&secure).settings.https_only);
}

#[test]
fn proxy_protocol_needs_somebody_who_may_send_headers() {
    let listen = |lines: &str| format!("[[listen]]\naddress = \":80\"\n{lines}proxy_protocol = true\n");
    let nobody = "t.toml:3:18: listen.proxy_protocol: nobody may send a PROXY header; name the balancer in \
                  trusted_proxies";
    assert_eq!(errors(&listen("")), [nobody]);
    let trusted = "trusted_proxies = [\"192.0.2.1\"]\n";
    let listeners = accepted(&format!("{trusted}{}", listen("protocol = \"https\"\n"))).settings.listeners;
    assert!(listeners.iter().all(|listener| listener.proxy_protocol));
    for protocol in ["dhttp", "trickles"] {
        let text = format!("{trusted}{}", listen(&format!("protocol = \"{protocol}\"\n")));
        let expected = "t.toml:5:18: listen.proxy_protocol: only protocol = \"http\" and \"https\" have it";
        assert_eq!(errors(&text), [expected]);
    }
    // What is wrong with the list is said once.
    assert_eq!(errors(&format!("trusted_proxies = \"192.0.2.1\"\n{}", listen(""))).len(), 1);
    assert!(!accepted(&listen("").replace("true", "false")).settings.listeners[0].proxy_protocol);
}

#[test]
fn http3_is_for_https_without_a_balancer() {
    let listen = |lines: &str| format!("[[listen]]\naddress = \":443\"\n{lines}http3 = true\n");
    let only_https = "listen.http3: only protocol = \"https\" has it";
    assert_eq!(errors(&listen("")), [format!("t.toml:3:9: {only_https}")]);
    for protocol in ["http", "dhttp", "trickles"] {
        let text = listen(&format!("protocol = \"{protocol}\"\n")).replace("443", "8443");
        assert_eq!(errors(&text), [format!("t.toml:4:9: {only_https}")], "{protocol}");
    }
    let by_balancer = format!(
        "trusted_proxies = [\"192.0.2.1\"]\n{}",
        listen("protocol = \"https\"\nproxy_protocol = true\n")
    );
    let expected = "t.toml:6:9: listen.http3: a balancer's PROXY header comes by TCP alone; leave out `http3`, or \
                    `proxy_protocol`";
    assert_eq!(errors(&by_balancer), [expected]);
    let https = listen("protocol = \"https\"\n");
    assert!(accepted(&https).settings.listeners[0].http3);
    assert!(!accepted(&https.replace("true", "false")).settings.listeners[0].http3);
    assert!(errors(&listen("").replace("true", "false")).is_empty());
}

#[test]
fn http3_needs_its_udp_port_for_itself() {
    let beside = |other: &str, lines: &str| {
        format!(
            "[[listen]]\naddress = \"127.0.0.1:8443\"\nprotocol = \"https\"\n{lines}\
             [[listen]]\naddress = \"{other}\"\nprotocol = \"trickles\"\n"
        )
    };
    let expected = "t.toml:4:9: listen.http3: at this UDP port listens the [[listen]] \"127.0.0.1:8443\"; choose \
                    another port for one of them";
    assert_eq!(errors(&beside("127.0.0.1:8443", "http3 = true\n")), [expected]);
    // Of all addresses it is one.
    let found = errors(&beside("0.0.0.0:8443", "http3 = true\n"));
    assert_eq!(found, [expected.replace("\"127.0.0.1:8443\"", "\"0.0.0.0:8443\"")]);
    // Whichever of them comes first.
    let (https, trickles) = (beside("127.0.0.1:8443", "http3 = true\n"), "protocol = \"trickles\"\n");
    let (first, second) = https.split_at(https.rfind("[[listen]]").unwrap());
    assert!(second.ends_with(trickles));
    assert_eq!(errors(&format!("{second}{first}")), [expected.replace("t.toml:4:9", "t.toml:7:9")]);
    for (other, lines) in
        [("127.0.0.1:8444", "http3 = true\n"), ("127.0.0.2:8443", "http3 = true\n"), ("127.0.0.1:8443", "")]
    {
        let found = errors(&beside(other, lines));
        assert!(found.is_empty(), "{other}: {found:?}");
    }
}

#[test]
fn methods_in_small_letters_are_refused() {
    for table in ["[[filter]]\n", "[[icap]]\nservice = \"icap://127.0.0.1:1/a\"\non = \"requests\"\n"] {
        let findings = parse("t.toml", &format!("{table}methods = [\"GET\", \"put\"]\n")).unwrap_err();
        assert!(lines(&findings).contains("case counts, write \"PUT\""), "{}", lines(&findings));
    }
}

#[test]
fn block_lists_that_cannot_be_read_are_warned_of() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("drop.list");
    let text = format!("[block]\nfiles = [{path:?}]\n");
    let about =
        || warnings(&text).into_iter().filter(|line| line.contains("block.files")).collect::<Vec<_>>();
    assert!(about()[0].contains("No such file"), "{:?}", about());
    std::fs::write(&path, "10.0.0.1\nten\n").unwrap();
    assert!(about()[0].contains("line 2: `ten`"), "{:?}", about());
    std::fs::write(&path, "10.0.0.1\n").unwrap();
    assert!(about().is_empty(), "{:?}", about());
}

#[test]
fn names_alone_that_exempt_everybody_are_warned_of() {
    let text = |source: &str| format!("[[exempt]]\nsource = \"{source}\"\nuser_agent = \"bot\"\n");
    let about = |text: &str| warnings(text).into_iter().filter(|line| line.contains("exempt.source")).count();
    assert_eq!((about(&text("0.0.0.0/0")), about(&text("192.0.2.0/24"))), (1, 0));
}

/// A file for `tidegate run` may have the rules of a chain of filters as well.
#[test]
fn the_filter_police_knows_the_names_that_a_file_may_begin_with() {
    let names: Vec<_> = FILE.keys.iter().map(|key| key.name).collect();
    assert_eq!(tidegate_conditioning::policy::TOP_LEVEL, names);
}

#[test]
fn name_of_the_servers_certificates_takes_the_place_of_theirs() {
    let text = "[[listen]]\naddress = \"127.0.0.1:1\"\n[[upstream]]\nname = \"app\"\nservers = [\"https://127.0.0.1:2\", \
                \"127.0.0.1:3\"]\ntls = { name = \"APP.example\", verify = false }\n[[route]]\nupstream = \"app\"\n";
    let upstream = &accepted(text).settings.upstreams[0];
    let server = TlsServer::new("127.0.0.1:2".parse().unwrap(), "app.example").unwrap();
    let plain = ServerAddress::Ip("127.0.0.1:3".parse().unwrap());
    assert_eq!(upstream.servers, [ServerAddress::Tls(server), plain]);
    assert!(!upstream.tls.verify);
}

#[test]
fn names_that_no_certificate_is_issued_for_are_refused() {
    let text =
        |lines: &str| format!("[[listen]]\naddress = \":443\"\nprotocol = \"https\"\n[acme]\n{lines}\n");
    let of = |lines: &str| errors(&text(lines)).join("\n");
    for (lines, expected) in [
        (
            "names = [\"*.example.org\"]",
            "t.toml:5:10: acme.names: expected the name of a host without `*`, not \"*.example.org\"; authorities look \
             for those in DNS only: order it by another program, and name its files in a [[certificate]]",
        ),
        (
            "names = [\"a.example\", \"192.0.2.1\"]",
            "t.toml:5:23: acme.names: expected the name of a host, not \"192.0.2.1\"; for example \"www.example.org\"",
        ),
        ("names = [\"a.example\", \"A.example\"]", "t.toml:5:23: acme.names: \"a.example\" is there twice"),
        (
            "names = [\"a.example\"]\nemail = \"ops\"",
            "t.toml:6:9: acme.email: expected an address such as \"ops@example.org\", not \"ops\"",
        ),
        (
            "names = [\"a.example\"]\ndirectory = \"http://127.0.0.1/dir\"",
            "t.toml:6:13: acme.directory: expected https://HOST/PATH, not \"http://127.0.0.1/dir\"; for example \
             \"https://acme-v02.api.letsencrypt.org/directory\"",
        ),
    ] {
        assert_eq!(of(lines), expected);
    }
    for name in ["-a.example", "a..example", ".", "a/../b", "a_b.example", "[::1]", &"a".repeat(64)] {
        let said = of(&format!("names = [{name:?}]"));
        assert!(said.contains("acme.names: expected"), "{name}: {said}");
    }
    let acme = accepted(&text("names = [\"A.example\"]")).acme.unwrap();
    assert_eq!(acme.names, ["a.example"]);
    assert!(acme.directory.starts_with("https://acme-v02.api.letsencrypt.org/"));
    // The warning of a listener without a certificate is of no use where one is ordered.
    let about =
        |text: &str| warnings(text).into_iter().filter(|line| line.contains("listen.protocol")).count();
    assert_eq!(about(&text("names = [\"a.example\"]")), 0);
    let clear = "[[listen]]\naddress = \":80\"\n[acme]\nnames = [\"a.example\"]\n";
    let expected = "acme: no [[listen]] has protocol = \"https\": nothing is ordered";
    assert!(warnings(clear).iter().any(|line| line.contains(expected)), "{:?}", warnings(clear));
}
