//! From checked values to the ICAP services.

use tidegate_accelerator::settings::{IcapService, IcapSubject};
use tidegate_http::normalize::Personality;

use super::report::Report;
use super::routes::check_path;
use super::walk::Values;
use crate::units;

/// RFC 3507 §4.2.
const PORT: u16 = 1344;

pub(super) fn build(file: &Values, personality: Personality, report: &mut Report<'_>) -> Vec<IcapService> {
    file.tables("icap").iter().filter_map(|section| service(section, personality, report)).collect()
}

fn service(section: &Values, personality: Personality, report: &mut Report<'_>) -> Option<IcapService> {
    let written = section.text("service")?;
    let offset = section.offset_of("service").unwrap_or(section.offset);
    let mut error = |message: String, hint: Option<&str>| {
        report.error(offset, format!("icap.service: {message}"), hint.map(str::to_owned));
    };
    let parts = written.strip_prefix("icap://").and_then(|rest| rest.split_once('/'));
    let is_name = |name: &&str| {
        let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'#';
        !name.is_empty() && name.bytes().all(is_plain)
    };
    let Some((authority, name)) = parts.filter(|(_, name)| is_name(name)) else {
        let message = format!("expected icap://HOST:PORT/NAME, not {written:?}");
        error(message, Some("for example icap://127.0.0.1:1344/avscan"));
        return None;
    };
    let has_port = authority.rsplit(']').next().is_some_and(|rest| rest.contains(':'));
    let authority = if has_port { authority.to_owned() } else { format!("{authority}:{PORT}") };
    let address = match units::server(&authority) {
        Ok(addresses) => *addresses.first()?,
        Err(why) => {
            error(why.to_string(), None);
            return None;
        }
    };
    for key in ["paths", "except"] {
        for at in section.texts(key).into_iter().filter(|at| at.value.starts_with('/')) {
            check_path(report, at.offset, &format!("icap.{key}"), &at.value, personality);
        }
    }
    let texts = |name| section.texts(name).into_iter().map(|at| at.value).collect();
    Some(IcapService {
        url: format!("icap://{authority}/{name}"),
        address,
        on: match section.text("on").as_deref() {
            Some("responses") => IcapSubject::Responses,
            _ => IcapSubject::Requests,
        },
        methods: texts("methods"),
        paths: texts("paths"),
        except: texts("except"),
        connections: section.integer("connections").and_then(|n| usize::try_from(n).ok()).unwrap_or(16),
        timeout: section.duration("timeout").unwrap_or(std::time::Duration::from_secs(5)),
        fail_open: section.text("failure").as_deref() == Some("open"),
        busy_open: section.text("busy").as_deref() == Some("open"),
    })
}
