//! The admin server and the commands that ask it: metrics, status, cache, reload, drain.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tidegate_e2e::{Client, Gate, Origin, Process, Reply, Response, Tidegate, eventually, free_port};

fn cacheable() -> Origin {
    Origin::start(|request| {
        let tag = if request.target.starts_with("/news/") { "news" } else { "other" };
        Reply::ok(request.target.clone()).with("Cache-Control", "max-age=600").with("Cache-Tag", tag)
    })
}

/// Requests an object until it comes from the cache.
fn store(tidegate: &Tidegate, target: &str) {
    eventually("it is stored", || tidegate.get(target).is_hit().then_some(()));
}

fn ask(tidegate: &Tidegate, method: &str, target: &str, fields: &str) -> Response {
    let mut client = Client::connect(tidegate.admin());
    client.send(format!(
        "{method} {target} HTTP/1.1\r\nHost: {}\r\nContent-Length: 0\r\n{fields}\r\n",
        tidegate.admin()
    ));
    client.response_to(method)
}

fn json(response: &Response) -> Value {
    serde_json::from_str(&response.text()).unwrap_or_else(|error| panic!("{error}: {response:?}"))
}

fn out(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The only line on standard error of a command that failed.
fn error(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(output.status.code() == Some(1) && text.lines().count() == 1, "{output:?}");
    text.trim_end().to_owned()
}

#[test]
fn metrics_are_in_the_text_format_of_prometheus() {
    let origin = cacheable();
    let tidegate = Tidegate::before(&origin);
    store(&tidegate, "/a");
    let response = ask(&tidegate, "GET", "/metrics", "");
    assert!(response.field("Content-Type").starts_with("text/plain; version=0.0.4"), "{response:?}");
    let (mut help, mut kind, mut samples) = (Vec::new(), Vec::new(), 0);
    for line in response.text().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["#", "HELP", name, ..] => {
                assert!(words.len() > 4 && line.ends_with('.'), "no sentence: {line}");
                help.push(name.to_owned());
            }
            ["#", "TYPE", name, "counter" | "gauge" | "histogram"] => kind.push(name.to_owned()),
            [name, value] => {
                let name = name.split('{').next().unwrap();
                let of_histogram =
                    ["_bucket", "_sum", "_count"].into_iter().find_map(|part| name.strip_suffix(part));
                let name = of_histogram.filter(|name| help.iter().any(|known| known == name)).unwrap_or(name);
                assert!(name.starts_with("tidegate_") && help.iter().any(|known| known == name), "{line}");
                assert!(value.parse::<f64>().is_ok(), "{line}");
                samples += 1;
            }
            _ => panic!("neither comment nor sample: {line}"),
        }
    }
    assert_eq!(help, kind);
    let twice: Vec<&String> =
        help.iter().filter(|name| help.iter().filter(|other| other == name).count() > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
    assert!(samples >= help.len() && samples > 20, "{samples}");
    assert!(tidegate.metric("tidegate_store_objects") >= 1.0);
    assert_eq!(tidegate.metric("tidegate_upstream_healthy"), 1.0);
}

#[test]
fn status_says_what_listens_what_is_cached_and_how_the_upstreams_are() {
    let origin = cacheable();
    let tidegate = Tidegate::before(&origin);
    store(&tidegate, "/a");
    let status = json(&ask(&tidegate, "GET", "/status", ""));
    assert_eq!(status["listeners"][0], format!("http://{}", tidegate.address()));
    assert_eq!(status["enforcement"]["mechanism"], "user space");
    assert_eq!(status["upstreams"][0]["server"], origin.address().to_string());
    assert_eq!(status["upstreams"][0]["healthy"], true);
    assert!(status["cache"]["objects"].as_u64() >= Some(1), "{status}");
    assert!(status["counters"].as_object().unwrap().len() > 10, "{status}");

    let by_command: Value = serde_json::from_str(&out(&tidegate.command(&["status", "--json"]))).unwrap();
    assert_eq!(by_command["listeners"], status["listeners"]);
    let text = out(&tidegate.command(&["status"]));
    for wanted in [&format!("listening on http://{}", tidegate.address()), "UPSTREAM", "COUNTER", "cache: "] {
        assert!(text.contains(wanted), "{text}");
    }
}

#[test]
fn status_without_a_cache_says_that_it_is_off() {
    let origin = cacheable();
    let tidegate = Tidegate::builder().origin(&origin).cache("memory = \"0B\"").start();
    assert!(out(&tidegate.command(&["status"])).contains("cache: off\n"));
    assert!(out(&tidegate.command(&["cache", "save"])).contains("the cache is off"));
    assert_eq!(out(&tidegate.command(&["cache", "list"])), "");
}

#[test]
fn cache_is_listed_and_purged_by_url_prefix_and_tag() {
    let origin = cacheable();
    let tidegate = Tidegate::before(&origin);
    let listed = || {
        let entries: Value =
            serde_json::from_str(&out(&tidegate.command(&["cache", "list", "--json"]))).unwrap();
        let mut urls: Vec<String> = entries
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["url"].as_str().unwrap().to_owned())
            .collect();
        urls.sort();
        urls
    };
    let url = |target: &str| format!("http://example.org{target}");
    for target in ["/a", "/images/1", "/images/2", "/news/1", "/z"] {
        store(&tidegate, target);
    }
    assert_eq!(listed(), ["/a", "/images/1", "/images/2", "/news/1", "/z"].map(url));
    let table = out(&tidegate.command(&["cache", "list", "--limit", "2"]));
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.starts_with("STATUS"), "{table}");

    let purge = |pattern: &str| -> Value {
        serde_json::from_str(&out(&tidegate.command(&["cache", "purge", pattern, "--json"]))).unwrap()
    };
    assert_eq!(purge(&url("/a"))["removed"], 1);
    assert_eq!(purge(&url("/images/*"))["removed"], 2);
    assert_eq!(purge("tag:news")["removed"], 1);
    assert_eq!(purge(&url("/a"))["removed"], 0);
    assert_eq!(listed(), [url("/z")]);
    assert_eq!(out(&tidegate.command(&["cache", "purge", "*"])), "1 response removed\n");
    assert!(!tidegate.get("/z").is_hit());
    assert_eq!(
        out(&tidegate.command(&["cache", "save"])),
        "the cache is in memory only and ends with the process: cache.path gives it a file\n"
    );
}

#[test]
fn a_cache_with_a_file_is_saved() {
    let (origin, folder) = (cacheable(), tempfile::tempdir().unwrap());
    let path = format!("path = {:?}", folder.path());
    let tidegate = Tidegate::builder().origin(&origin).cache(&path).start();
    store(&tidegate, "/a");
    assert_eq!(out(&tidegate.command(&["cache", "save"])), "the cache is written to its file\n");
}

#[test]
fn api_wrong_requests_are_refused_with_a_reason() {
    let origin = cacheable();
    let tidegate = Tidegate::before(&origin);
    store(&tidegate, "/a");
    let purge = "/api/cache/purge?pattern=*";
    let admin = tidegate.admin();
    for (method, target, fields, status) in [
        ("POST", "/api/cache/purge?pattern=nonsense", "", 400),
        ("POST", "/api/cache/purge", "", 400),
        ("GET", "/api/cache?limit=many", "", 400),
        ("GET", purge, "", 405),
        ("GET", "/api/nothing", "", 404),
        // A page on another site.
        ("POST", purge, "Origin: http://evil.example\r\n", 403),
        ("POST", purge, "Sec-Fetch-Site: cross-site\r\n", 403),
    ] {
        let response = ask(&tidegate, method, target, fields);
        assert_eq!(response.status, status, "{method} {target} {fields}: {response:?}");
    }
    // A name of the attacker's own that leads here.
    let mut client = Client::connect(admin);
    client.send("GET /status HTTP/1.1\r\nHost: rebound.example\r\n\r\n");
    assert_eq!(client.response().status, 421);
    assert!(tidegate.get("/a").is_hit(), "something was purged");
    assert_eq!(ask(&tidegate, "POST", purge, &format!("Origin: http://{admin}\r\n")).status, 200);
}

#[test]
fn dashboard_loads_nothing_from_elsewhere() {
    let origin = cacheable();
    let tidegate = Tidegate::before(&origin);
    let response = ask(&tidegate, "GET", "/", "");
    assert!(response.status == 200 && response.text().contains("<html"), "{response:?}");
    assert!(response.field("Content-Security-Policy").starts_with("default-src 'none'"), "{response:?}");
    assert!(!response.text().contains("https://"), "{}", response.text());
}

#[test]
fn reload_puts_new_routes_in_force() {
    let old = Origin::start(|_| Reply::ok("old").with("Cache-Control", "no-store"));
    let new = Origin::start(|_| Reply::ok("new").with("Cache-Control", "no-store"));
    let tidegate = Tidegate::before(&old);
    assert_eq!(tidegate.get("/").text(), "old");
    let config = std::fs::read_to_string(tidegate.config()).unwrap();
    tidegate.write_config(&config.replace(&old.address().to_string(), &new.address().to_string()));
    let answer: Value = serde_json::from_str(&out(&tidegate.command(&["reload", "--json"]))).unwrap();
    assert_eq!(answer["message"], format!("{} was read again and is in force", tidegate.config().display()));
    eventually("the new origin answers", || (tidegate.get("/").text() == "new").then_some(()));
    assert_eq!(answer["warnings"], serde_json::json!([]));

    tidegate.write_config(&(config + "[[connection]]\nburst = 5\n"));
    let reloaded = tidegate.command(&["reload"]);
    let warnings = String::from_utf8_lossy(&reloaded.stderr);
    assert!(reloaded.status.success() && warnings.starts_with("warning: "), "{reloaded:?}");
    assert!(warnings.contains("connection.burst has no effect without connection.rate"), "{warnings}");
}

/// It said that the configuration had been read again.
#[test]
fn reload_of_a_server_without_a_configuration_file_says_that_there_is_none_and_what_to_do() {
    let (listen, admin) = (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port()));
    let tidegate = || Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let run = ["run", "--listen", &listen, "--root", "/", "--admin", &admin];
    let _running = Process(tidegate().args(run).stderr(Stdio::null()).spawn().unwrap());
    let reload = || tidegate().args(["reload", "--admin", &admin]).output().unwrap();
    let said = out(&eventually("it reloads", || Some(reload()).filter(|output| output.status.success())));
    assert!(said.starts_with("there is no configuration file to read again"), "{said}");
    assert!(said.ends_with("start it with --config FILE\n"), "{said}");
}

/// It did not say which file.
#[test]
fn reload_names_the_file_that_was_read_by_its_whole_path() {
    let folder = tempfile::tempdir().unwrap();
    let (listen, admin) = (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port()));
    let text = format!("[[listen]]\naddress = {listen:?}\n[[route]]\nroot = \"/\"\n");
    std::fs::write(folder.path().join("other.toml"), text).unwrap();
    let tidegate = || Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let mut run = tidegate();
    run.args(["run", "--config", "other.toml", "--admin", &admin]).current_dir(folder.path());
    let _running = Process(run.stderr(Stdio::null()).spawn().unwrap());
    let reload = || tidegate().args(["reload", "--admin", &admin]).output().unwrap();
    let said = out(&eventually("it reloads", || Some(reload()).filter(|output| output.status.success())));
    let file = folder.path().canonicalize().unwrap().join("other.toml");
    assert_eq!(said, format!("{} was read again and is in force\n", file.display()));
}

#[test]
fn reload_of_what_needs_a_restart_is_refused_as_a_whole_and_named() {
    let old = Origin::start(|_| Reply::ok("old").with("Cache-Control", "no-store"));
    let new = Origin::start(|_| Reply::ok("new").with("Cache-Control", "no-store"));
    let tidegate = Tidegate::before(&old);
    let config = std::fs::read_to_string(tidegate.config()).unwrap();
    let config = config.replace(&old.address().to_string(), &new.address().to_string());
    let other = format!("127.0.0.1:{}", free_port());
    let with = |from: &str, to: &str| {
        let text = config.replace(from, to);
        assert_ne!(text, config);
        text
    };
    for (text, wanted) in [
        (with(&tidegate.address().to_string(), &other), &[(&*other, "[[listen]]")][..]),
        (with(&tidegate.admin().to_string(), &other), &[("[admin]", "[admin]")]),
        (with("32MiB", "16MiB"), &[("16MiB", "cache.memory")]),
        (config.clone() + "[log]\naccess = \"-\"\n", &[("[log]", "[log]")]),
        (
            format!("workers = 17\n{}", with("32MiB", "16MiB")),
            &[("16MiB", "cache.memory"), ("workers", "workers")],
        ),
    ] {
        tidegate.write_config(&text);
        let output = tidegate.command(&["reload"]);
        assert!(!output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        let said = said.strip_prefix("error: the old configuration stays in force: ").unwrap();
        let said: Vec<_> = said.lines().collect();
        assert_eq!(said.len(), wanted.len(), "{said:?}");
        for (said, (mark, name)) in said.iter().zip(wanted) {
            let line = 1 + text.lines().position(|line| line.contains(mark)).unwrap();
            let place = format!("{}:{line}:", tidegate.config().display());
            assert!(said.starts_with(&place), "{said} does not begin with {place}");
            let reason = format!(": {name} cannot change while running; restart to apply it");
            assert!(said.ends_with(&reason), "{said}");
        }
        assert_eq!(tidegate.get("/").text(), "old");
    }
}

#[test]
fn reload_of_a_wrong_file_says_where_it_is_wrong_and_what_runs_goes_on() {
    let origin = Origin::start(|_| Reply::ok("ok").with("Cache-Control", "no-store"));
    let tidegate = Tidegate::before(&origin);
    tidegate.write_config("[limits]\nfields = 0\n");
    let line = error(&tidegate.command(&["reload"]));
    let wanted = format!("{}:2:10: limits.fields: expected", tidegate.config().display());
    assert!(line.contains(&wanted), "{line}");
    assert_eq!(tidegate.get("/").text(), "ok");
}

#[test]
fn drain_finishes_what_is_in_progress_refuses_new_connections_and_ends() {
    let (gate, origin) = held_origin();
    let mut tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET /slow HTTP/1.1\r\nHost: example.org\r\n\r\n");
    eventually("the request is with the origin", || (origin.count() == 1).then_some(()));
    assert!(out(&tidegate.command(&["drain"])).starts_with("draining: "));
    eventually("no new connections", || Client::try_connect(tidegate.address()).is_err().then_some(()));
    gate.open();
    assert_eq!(client.response().text(), "finished");
    assert!(tidegate.wait().success());
}

fn held_origin() -> (Gate, Origin) {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |_| {
        held.pass();
        Reply::ok("finished")
    });
    (gate, origin)
}

#[test]
fn standard_error_whose_reader_is_gone_a_drain_still_finishes_what_is_in_progress() {
    let (gate, origin) = held_origin();
    let (listen, admin) = (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port()));
    let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["run", "--listen", &listen, "--admin", &admin])
        .args(["--upstream", &format!("http://{}", origin.address())])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut client = eventually("it listens", || {
            Client::try_connect(admin.parse().unwrap())
                .and_then(|_| Client::try_connect(listen.parse().unwrap()))
                .ok()
        });
        client.send("GET /slow HTTP/1.1\r\nHost: example.org\r\n\r\n");
        // One more connection than the probe at the start.
        eventually("the request is with the origin", || (origin.count() == 1).then_some(()));
        drop(child.stderr.take());
        kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::TERM).unwrap();
        eventually("no new connections", || {
            Client::try_connect(listen.parse().unwrap()).is_err().then_some(())
        });
        assert!(child.try_wait().unwrap().is_none(), "it ended with a request in progress");
        gate.open();
        assert_eq!(client.response().text(), "finished");
        let status = eventually("it ends", || child.try_wait().unwrap());
        assert_eq!(status.code(), Some(0));
    }));
    let _ = child.kill();
    let _ = child.wait();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn requests_are_counted_by_how_long_they_took_and_what_the_cache_did() {
    let origin = cacheable();
    let tidegate = Tidegate::before(&origin);
    store(&tidegate, "/a");
    // A response is counted after it is sent.
    let text = eventually("both are counted", || {
        let text = ask(&tidegate, "GET", "/metrics", "").text();
        let has = |cache: &str| {
            let name = format!("tidegate_request_duration_seconds_count{{cache=\"{cache}\"}} ");
            text.lines().any(|line| line.strip_prefix(&name).is_some_and(|count| count != "0"))
        };
        (has("hit") && has("miss")).then_some(text.clone())
    });
    let value = |name: &str| {
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    for cache in ["hit", "miss"] {
        let count = value(&format!("tidegate_request_duration_seconds_count{{cache=\"{cache}\"}}"));
        assert!(count >= 1.0, "{cache}: {count}");
        let last =
            value(&format!("tidegate_request_duration_seconds_bucket{{cache=\"{cache}\",le=\"+Inf\"}}"));
        assert_eq!(count, last, "{cache}");
        let first =
            value(&format!("tidegate_request_duration_seconds_bucket{{cache=\"{cache}\",le=\"0.0001\"}}"));
        assert!(first <= last, "{cache}");
    }
    assert!(value("tidegate_request_duration_seconds_sum{cache=\"miss\"}") > 0.0);
    let version = format!("tidegate_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
    assert_eq!(value(&version), 1.0);
}

#[test]
fn a_query_that_does_not_fit_is_refused_in_json() {
    let origin = cacheable();
    let tidegate = Tidegate::before(&origin);
    let response = ask(&tidegate, "POST", "/api/cache/purge", "");
    assert_eq!(response.status, 400);
    assert!(json(&response)["error"].as_str().unwrap().contains("pattern"), "{response:?}");
}

#[test]
fn static_files_are_purged_by_their_url_and_by_the_name_in_the_list() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.txt", "b.txt", "c.txt"] {
        std::fs::write(folder.path().join(name), name).unwrap();
    }
    let target = format!("root = \"{}\"", folder.path().display());
    let tidegate = Tidegate::builder().route("/", &target).start();
    for (file, pattern) in [
        ("a.txt", "/a.txt".to_owned()),
        ("b.txt", "http://static.test/b.txt".into()),
        ("c.txt", format!("file:{}/c.txt", folder.path().display())),
    ] {
        let listed = || out(&tidegate.command(&["cache", "list"])).contains(file);
        eventually("it is stored", || {
            tidegate.get(&format!("/{file}"));
            listed().then_some(())
        });
        let purged = out(&tidegate.command(&["cache", "purge", &pattern]));
        assert!(purged.contains("removed") && !purged.starts_with("0 "), "{pattern}: {purged}");
        assert_eq!(tidegate.get(&format!("/{file}")).text(), file);
    }
}

#[test]
fn variants_of_one_url_are_told_apart_and_files_do_not_expire() {
    let site = tempfile::tempdir().unwrap();
    std::fs::write(site.path().join("page.txt"), "page").unwrap();
    let origin = Origin::start(|_| {
        Reply::ok("x").with("Cache-Control", "max-age=600").with("Vary", "Accept-Language, Cookie, X-Kind")
    });
    let tidegate = Tidegate::builder()
        .top("trusted_proxies = [\"127.0.0.0/8\"]")
        .group("app", &[origin.address()], "")
        .route("/", "upstream = \"app\"")
        .route("/files/", &format!("root = \"{}\"", site.path().display()))
        .start();
    let languages = ["Accept-Language: de, en;q=0.5\r\nCookie: session=secret\r\n", "X-Kind: a, b\r\n", ""];
    let proxied = "X-Forwarded-Host: b.example\r\n";
    for fields in languages.iter().chain([&proxied]) {
        eventually("it is stored", || tidegate.get_with("/v", fields).is_hit().then_some(()));
    }
    std::fs::create_dir(site.path().join("files")).unwrap();
    for name in ["page.txt", "files/page.txt"] {
        std::fs::write(site.path().join(name), "page").unwrap();
    }
    eventually("the file is served", || (tidegate.get("/files/page.txt").status == 200).then_some(()));
    let listed = || -> Vec<Value> {
        let text = out(&tidegate.command(&["cache", "list", "--json"]));
        serde_json::from_str::<Value>(&text).unwrap().as_array().unwrap().clone()
    };
    let is_file = |entry: &Value| entry["url"].as_str().unwrap().starts_with("file:");
    let entries = eventually("all are listed", || {
        // What was answered before the watcher had told of the new directory has left the cache again.
        assert_eq!(tidegate.get("/files/page.txt").status, 200);
        Some(listed()).filter(|entries| entries.len() >= 5 && entries.iter().any(is_file))
    });
    let (files, variants): (Vec<&Value>, Vec<&Value>) = entries.iter().partition(|entry| is_file(entry));
    assert!(files.iter().all(|file| file["ttl_s"].is_null() && file["selected_by"] == serde_json::json!({})));
    assert!(
        variants.iter().all(|entry| (1..=600).contains(&entry["ttl_s"].as_i64().unwrap())),
        "{entries:?}"
    );
    let selections: Vec<&Value> = variants.iter().map(|entry| &entry["selected_by"]).collect();
    let with = |name: &str, value: Value| {
        let found: Vec<_> = selections.iter().filter(|fields| fields[name] == value).collect();
        found.len()
    };
    assert_eq!(selections.len(), 4, "{selections:?}");
    assert_eq!(with("accept-language", "de, en;q=0.5".into()), 1, "{selections:?}");
    assert_eq!(with("x-kind", "a,b".into()), 1, "{selections:?}");
    assert_eq!(with("x-forwarded-host", "b.example".into()), 1, "{selections:?}");
    assert_eq!(with("cookie", Value::Null), 3, "{selections:?}");
    let table = out(&tidegate.command(&["cache", "list"]));
    assert!(!table.contains("secret"), "a session's cookie is shown: {table}");
    let line =
        |word: &str| table.lines().find(|line| line.contains(word)).unwrap_or_else(|| panic!("{table}"));
    assert!(line("de, en;q=0.5").contains("; cookie: #"), "{table}");
    assert!(line("x-kind: a,b").ends_with("no accept-language; no cookie; x-kind: a,b"), "{table}");
    assert!(line("page.txt").contains(" never "), "{table}");
}

#[test]
fn access_log_in_json_is_read_back_as_what_the_client_sent() {
    let origin = cacheable();
    let table = "[log]\naccess = \"@DIR@/access.txt\"\nformat = \"json\"";
    let tidegate = Tidegate::builder().origin(&origin).tables(table).start();
    let agent = "Mozilla \"é\" 中\\🦀\u{9b}";
    let mut client = tidegate.connect();
    let mut request =
        format!("GET /a HTTP/1.1\r\nHost: a.example\r\nUser-Agent: {agent}\r\nReferer: ").into_bytes();
    request.extend_from_slice(b"http://r.example/\xff\r\n\r\n");
    client.send(request);
    assert_eq!(client.response().status, 200);
    let line = eventually("a line", || {
        let text = std::fs::read_to_string(tidegate.directory().join("access.txt")).ok()?;
        text.lines().next().map(str::to_owned)
    });
    let object: Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&object["user_agent"], &object["target"]), (&agent.into(), &"/a".into()), "{line}");
    assert_eq!(object["referer"], "http://r.example/\\xff", "{line}");
}
