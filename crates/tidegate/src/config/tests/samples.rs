//! Every key of the table, once: that it reaches the settings, and that the JSON Schema agrees with `check`.

use serde_json::Value;

use super::super::keys::{FILE, Key, Section};
use super::super::kind::Kind;
use super::super::schema;
use super::{UPSTREAM, accepted, parse};

const TLS_UPSTREAM: &str = "[[upstream]]\nname = \"app\"\nservers = [\"https://127.0.0.1:1\"]\n";

/// A value that differs from the default.
fn sample(path: &str, kind: Kind) -> String {
    match (path, kind) {
        ("listen.protocol", _) => "\"dhttp\"".into(),
        ("route.root", _) => "\"/\"".into(),
        ("log.format", _) => "\"json\"".into(),
        ("cache.memory" | "defence.memory", _) => "\"1048576B\"".into(),
        ("gate.interfaces", _) => "[\"eth0\"]".into(),
        ("gate.http_ports", _) => "[\"80\", \"8000-8099\"]".into(),
        ("block.files", _) => "[\"/other\"]".into(),
        (
            "https_only"
            | "listen.http2"
            | "listen.http3"
            | "upstream.http2"
            | "listen.proxy_protocol"
            | "defence.dry_run"
            | "classifier.dry_run"
            | "filter.dry_run",
            _,
        ) => "true".into(),
        ("filter.action", _) => "\"drop\"".into(),
        ("icap.service", _) => "\"icap://127.0.0.1:17/other\"".into(),
        ("acme.directory", _) => "\"https://other.example/directory\"".into(),
        ("route.redirect", _) => "\"https://other.example/*\"".into(),
        ("route.request_fields.remove" | "route.response_fields.remove", _) => "[\"X-Other\"]".into(),
        ("acme.email", _) => "\"other@example.org\"".into(),
        (_, Kind::Text) => "\"other\"".into(),
        (_, Kind::Flag) => "false".into(),
        (_, Kind::Integer { min, max }) => 7.clamp(min, max).to_string(),
        (_, Kind::Number { .. }) => "7.5".into(),
        (_, Kind::Share) => "0.375".into(),
        (_, Kind::Duration { .. }) => "\"1234s\"".into(),
        (_, Kind::Size { .. }) => "\"1234B\"".into(),
        (_, Kind::Rate { .. }) => "\"17B/s\"".into(),
        (_, Kind::Choice(names)) => format!("{:?}", names[1]),
        (_, Kind::Name) => "\"other\"".into(),
        (_, Kind::Listen) => "\"127.0.0.1:17\"".into(),
        (_, Kind::Host) => "\"other.example\"".into(),
        (_, Kind::UrlPath | Kind::Pattern | Kind::Path) => "\"/other\"".into(),
        (_, Kind::List { of: Kind::Server, .. }) => "[\"127.0.0.1:17\", \"127.0.0.1:18\"]".into(),
        (_, Kind::List { of: Kind::Pattern, .. }) => "[\"/other\"]".into(),
        (_, Kind::List { of: Kind::Host, .. }) => "[\"other.example\"]".into(),
        (_, Kind::List { of: Kind::Method, .. }) => "[\"PUT\"]".into(),
        (_, Kind::List { of: Kind::Choice(names), .. }) => format!("[{:?}]", names[1]),
        (_, Kind::List { of: Kind::MediaType, .. }) => "[\"text/other\"]".into(),
        (_, Kind::List { .. }) => "[\"10.0.0.0/8\"]".into(),
        (_, Kind::Prefix) => "\"10.0.0.0/8\"".into(),
        (_, Kind::Destination) => "\"10.0.0.1:80\"".into(),
        (_, Kind::Words) => "{ tier = \"gold\" }".into(),
        (path, _) => panic!("no sample for {path}"),
    }
}

/// Keys that hold a value, with their sections.
fn keys() -> impl Iterator<Item = (&'static Section, &'static Key)> {
    FILE.walk().into_iter().flat_map(|section| {
        let values = section.keys.iter().filter(|key| !matches!(key.kind, Kind::Table(_) | Kind::Tables(_)));
        values.map(move |key| (section, key))
    })
}

/// A file without the key, and one with it that differs in nothing else.
fn without_and_with(section: &Section, key: &Key, value: &str) -> (String, String) {
    // What the key's table needs to be accepted without it.
    let (before, needed) = match section.name {
        "listen"
            if matches!(key.name, "keys" | "format" | "encryption" | "cache_entries" | "replay_entries") =>
        {
            ("", "address = \"127.0.0.1:1\"\nprotocol = \"trickles\"\n")
        }
        "listen" if key.name == "interface" => {
            ("", "address = \"127.0.0.1:1\"\nprotocol = \"trickles\"\nformat = \"tcp\"\n")
        }
        "listen" if key.name == "proxy_protocol" => {
            ("trusted_proxies = [\"192.0.2.1\"]\n", "address = \"127.0.0.1:1\"\n")
        }
        "listen" if key.name == "http3" => ("", "address = \"127.0.0.1:1\"\nprotocol = \"https\"\n"),
        "" if key.name == "https_only" => ("", "trusted_proxies = [\"192.0.2.1\"]\n"),
        "acme" => ("", "names = [\"a.example\"]\n"),
        "certificate" => ("", "chain = \"/chain\"\nkey = \"/key\"\n"),
        "listen" => ("", "address = \"127.0.0.1:1\"\n"),
        "upstream" => ("", "name = \"app\"\nservers = [\"127.0.0.1:1\"]\n"),
        "upstream.health_check" => (UPSTREAM, "path = \"/\"\n"),
        "upstream.tls" => (TLS_UPSTREAM, ""),
        "upstream.tls.certificate" => (TLS_UPSTREAM, "chain = \"/chain\"\nkey = \"/key\"\n"),
        "route" if key.name == "redirect_status" => ("", "redirect = \"https://other.example/\"\n"),
        "route" => ("", "upstream = \"app\"\n"),
        "route.request_fields" | "route.response_fields" => ("[[route]]\nupstream = \"app\"\n", ""),
        "adapt" => ("", "latency = \"1s\"\n"),
        "log" => ("", "access = \"-\"\n"),
        "classifier" => ("", "name = \"errors\"\nlimit = 5\n"),
        "defence" if key.name == "sample" => ("", "external = \"/run/classifier\"\n"),
        "icap" => ("", "service = \"icap://127.0.0.1:1/a\"\non = \"requests\"\n"),
        "exempt" | "filter" => ("", "source = \"192.0.2.0/24\"\n"),
        "connection" if key.name == "burst" => ("", "rate = 5\n"),
        "request" if key.name == "burst" => ("", "cookie = { other = \"x\" }\nrate = 5\n"),
        "request" => ("", "cookie = { other = \"x\" }\n"),
        _ => ("", ""),
    };
    let header = if section.name.is_empty() { String::new() } else { format!("{}\n", section.title()) };
    let other = "[[upstream]]\nname = \"other\"\nservers = [\"127.0.0.1:1\"]\n";
    let after = match section.path_of(key.name).as_str() {
        // The key names a group itself.
        "upstream.name" => String::new(),
        path if path.starts_with("upstream") => format!("{other}[[route]]\nupstream = \"app\"\n"),
        path if path.starts_with("route") => format!("{other}{UPSTREAM}"),
        _ => other.to_owned(),
    };
    let replaced = if matches!(key.name, "root" | "redirect") { "upstream" } else { key.name };
    let kept: String = needed.split_inclusive('\n').filter(|line| !line.starts_with(replaced)).collect();
    (
        format!("{before}{header}{needed}{after}"),
        format!("{before}{header}{kept}{} = {value}\n{after}", key.name),
    )
}

#[test]
fn every_enforced_key_reaches_the_settings() {
    for (section, key) in keys().filter(|(section, _)| section.enforced) {
        let path = section.path_of(key.name);
        let (without, with) = without_and_with(section, key, &sample(&path, key.kind));
        let [without, settings] = [&without, &with].map(|text| {
            let loaded = accepted(text);
            format!(
                "{:?}",
                (
                    loaded.settings,
                    loaded.listen,
                    loaded.trickles,
                    loaded.acme,
                    loaded.admin,
                    loaded.required,
                    loaded.gate,
                    loaded.defence
                )
            )
        });
        assert_ne!(settings, without, "{path}: {with}");
    }
}

#[test]
fn schema_accepts_every_key_and_refuses_what_check_refuses() {
    let schema: Value = serde_json::from_str(&schema()).unwrap();
    let is_valid = |text: &str| {
        let file: Value = toml::from_str(text).unwrap();
        validate(&schema, &file).map_err(|why| format!("{why}\n{text}"))
    };
    for (section, key) in keys() {
        let path = section.path_of(key.name);
        let (without, with) = without_and_with(section, key, &sample(&path, key.kind));
        for text in [without, with] {
            assert!(parse("t.toml", &text).is_ok(), "{text}");
            assert_eq!(is_valid(&text), Ok(()));
        }
        // Of a type that no key has, and a neighbour that no table has.
        let (_, wrong) = without_and_with(section, key, "[[]]");
        let misspelt = sample(&path, key.kind) + "\nmisspelt = 1";
        for text in [wrong, without_and_with(section, key, &misspelt).1] {
            assert!(parse("t.toml", &text).is_err(), "{text}");
            assert!(is_valid(&text).is_err(), "{text}");
        }
        if let Kind::Integer { min, max } = key.kind {
            for value in [min, max] {
                assert_eq!(is_valid(&without_and_with(section, key, &value.to_string()).1), Ok(()));
            }
            assert!(is_valid(&without_and_with(section, key, &(max + 1).to_string()).1).is_err(), "{path}");
        }
    }
    for wrong in ["[[listen]]\n", "[cache]\nmemory = \"10\"\n", "[log]\nformat = \"xml\"\n", "listen = 1\n"] {
        assert!(is_valid(wrong).is_err(), "{wrong}");
    }
}

/// As much of JSON Schema as the generated one uses; an unknown keyword fails.
fn validate(schema: &Value, value: &Value) -> Result<(), String> {
    let wrong = |keyword: &str| Err(format!("{value} against {keyword} of {schema}"));
    for (keyword, rule) in schema.as_object().unwrap() {
        let holds = match keyword.as_str() {
            "$schema" | "title" | "description" | "default" => true,
            "type" => match rule.as_str().unwrap() {
                "object" => value.is_object(),
                "array" => value.is_array(),
                "string" => value.is_string(),
                "boolean" => value.is_boolean(),
                "integer" => value.is_u64() || value.is_i64(),
                "number" => value.is_number(),
                other => panic!("unknown type {other}"),
            },
            "enum" => rule.as_array().unwrap().contains(value),
            "minimum" => value.as_f64() >= rule.as_f64(),
            "maximum" => value.as_f64() <= rule.as_f64(),
            "exclusiveMinimum" => value.as_f64() > rule.as_f64(),
            "pattern" => value
                .as_str()
                .is_some_and(|text| regex::Regex::new(rule.as_str().unwrap()).unwrap().is_match(text)),
            "minLength" => value.as_str().is_some_and(|text| text.len() as u64 >= rule.as_u64().unwrap()),
            "minItems" => value.as_array().is_some_and(|items| items.len() as u64 >= rule.as_u64().unwrap()),
            "minProperties" => {
                value.as_object().is_some_and(|items| items.len() as u64 >= rule.as_u64().unwrap())
            }
            "required" => rule.as_array().unwrap().iter().all(|key| !value[key.as_str().unwrap()].is_null()),
            "items" => {
                for item in value.as_array().into_iter().flatten() {
                    validate(rule, item)?;
                }
                true
            }
            "properties" => {
                for (key, below) in rule.as_object().unwrap() {
                    if let Some(value) = value.get(key) {
                        validate(below, value)?;
                    }
                }
                true
            }
            "additionalProperties" if rule.is_object() => {
                for (_, value) in value.as_object().into_iter().flatten() {
                    validate(rule, value)?;
                }
                true
            }
            "additionalProperties" => {
                value.as_object().into_iter().flatten().all(|(key, _)| !schema["properties"][key].is_null())
            }
            other => panic!("unknown keyword {other}"),
        };
        if !holds {
            return wrong(keyword);
        }
    }
    Ok(())
}
