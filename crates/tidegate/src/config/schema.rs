//! The table of keys as a JSON Schema, for editors.

use serde_json::{Map, Value, json};

use super::keys::{FILE, Fallback, Key, Section};
use super::kind::Kind;

/// The JSON Schema (draft 2020-12) of configuration files, ended by a line feed.
pub(crate) fn schema() -> String {
    let mut root = section(&FILE);
    let head = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tidegate configuration",
        "description": "What `tidegate check` accepts, as far as a schema can say it.",
    });
    if let (Value::Object(root), Value::Object(head)) = (&mut root, head) {
        root.extend(head);
    }
    format!("{root:#}\n")
}

fn section(section: &'static Section) -> Value {
    let properties: Map<String, Value> =
        section.keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    let required: Vec<&str> = section
        .keys
        .iter()
        .filter(|key| matches!(key.default, Fallback::Required))
        .map(|key| key.name)
        .collect();
    let mut value = json!({
        "type": "object",
        "description": description(section),
        "additionalProperties": false,
        "properties": properties,
    });
    if !required.is_empty() {
        value["required"] = json!(required);
    }
    value
}

fn description(section: &Section) -> String {
    let not_enforced = if section.enforced { "" } else { " This version does not enforce it." };
    format!("{}{not_enforced}", section.doc)
}

fn property(key: &Key) -> Value {
    let mut value = kind(key.kind);
    if !matches!(key.kind, Kind::Table(_) | Kind::Tables(_)) {
        let without = match key.default {
            Fallback::Absent(words) => format!(" Without it: {words}."),
            Fallback::Required | Fallback::Is(_) => String::new(),
        };
        value["description"] = json!(format!("{}{without}", key.doc));
    }
    if let Fallback::Is(text) = key.default {
        value["default"] =
            if key.kind.is_text() { json!(text) } else { serde_json::from_str(text).unwrap_or(Value::Null) };
    }
    value
}

fn kind(kind: Kind) -> Value {
    match kind {
        Kind::Flag => json!({ "type": "boolean" }),
        Kind::Integer { min, max } => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Kind::Number { max } => json!({ "type": "number", "minimum": 0, "maximum": max }),
        Kind::Share => json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 1 }),
        Kind::Duration { .. } => json!({ "type": "string", "pattern": "^[0-9]+ *(ms|s|m|h|d)$" }),
        Kind::Size { .. } => json!({ "type": "string", "pattern": "^[0-9]+ *([kKmMgG][iI]?)?[bB]$" }),
        Kind::Rate { .. } => json!({ "type": "string", "pattern": "^[0-9]+ *([kKmMgG][iI]?)?[bB]/s$" }),
        Kind::Choice(names) => json!({ "type": "string", "enum": names }),
        Kind::Name => json!({ "type": "string", "pattern": "^[A-Za-z0-9._-]+$" }),
        Kind::MediaType => {
            json!({ "type": "string", "pattern": "^[A-Za-z0-9!#$&^_.+-]+/([A-Za-z0-9!#$&^_.+-]+[*]?|[*])$" })
        }
        Kind::Method => json!({ "type": "string", "pattern": "^[A-Z0-9._-]+$" }),
        Kind::Listen => json!({ "type": "string", "pattern": "^[^ ]*:[0-9]+$" }),
        Kind::UrlPath => json!({ "type": "string", "pattern": "^/[^ ?#]*$" }),
        Kind::Pattern => json!({ "type": "string", "pattern": "^[/*][^ ?#]*$" }),
        Kind::Ports => json!({ "type": "string", "pattern": "^([0-9]+(-[0-9]+)?|\\*)$" }),
        Kind::Server | Kind::Text | Kind::Prefix | Kind::Destination | Kind::Host | Kind::Path => {
            json!({ "type": "string", "minLength": 1 })
        }
        Kind::Words => {
            json!({ "type": "object", "minProperties": 1, "additionalProperties": { "type": "string" } })
        }
        Kind::List { of, min } => json!({ "type": "array", "items": self::kind(*of), "minItems": min }),
        Kind::Table(below) => section(below),
        Kind::Tables(below) => json!({ "type": "array", "items": section(below) }),
    }
}
