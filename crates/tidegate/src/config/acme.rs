//! From checked values to what is ordered of an authority.

use std::net::Ipv6Addr;
use std::path::PathBuf;

use http::Uri;
use http::uri::Authority;

use super::report::Report;
use super::walk::Values;
use crate::acme::AcmeSettings;

/// RFC 1035 §2.3.4.
const MAX_NAME_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;
/// Each is an order of its own, a few at the same time.
const MAX_NAMES: usize = 1000;

pub(super) fn build(file: &Values, report: &mut Report<'_>) -> Option<AcmeSettings> {
    let section = file.table("acme")?;
    let names = section.texts("names");
    let offset = section.offset_of("names")?;
    if names.len() > MAX_NAMES {
        let message = format!("acme.names: expected at most {MAX_NAMES}, not {}", names.len());
        report.error(offset, message, None);
    }
    let mut known: Vec<String> = Vec::with_capacity(names.len());
    for name in names.into_iter().take(MAX_NAMES) {
        let text = &name.value;
        if let Err((expected, hint)) = check_name(text) {
            report.error(
                name.offset,
                format!("acme.names: expected {expected}, not {text:?}"),
                Some(hint.into()),
            );
        } else if known.contains(text) {
            report.error(name.offset, format!("acme.names: {text:?} is there twice"), None);
        }
        known.push(name.value);
    }
    let directory = section.text("directory")?;
    let is_url = directory.parse::<Uri>().is_ok_and(|uri| {
        uri.scheme_str() == Some("https")
            && uri.host().is_some_and(is_host)
            && uri.authority().is_some_and(is_plain)
    });
    if !is_url {
        report.error(
            section.offset_of("directory").unwrap_or(offset),
            format!("acme.directory: expected https://HOST/PATH, not {directory:?}"),
            Some("for example \"https://acme-v02.api.letsencrypt.org/directory\"".into()),
        );
    }
    let email = section.text("email");
    if let Some(email) = email.as_ref().filter(|email| !is_email(email)) {
        report.error(
            section.offset_of("email").unwrap_or(offset),
            format!("acme.email: expected an address such as \"ops@example.org\", not {email:?}"),
            None,
        );
    }
    let has_tls =
        file.tables("listen").iter().any(|listen| listen.text("protocol").as_deref() == Some("https"));
    if !has_tls {
        report
            .warn(section.offset, "acme: no [[listen]] has protocol = \"https\": nothing is ordered".into());
    }
    let path = section.path("path").unwrap_or_else(PathBuf::new);
    Some(AcmeSettings { names: known, email, directory, path, authority: section.path("authority") })
}

/// What a name should be, and a hint.
fn check_name(name: &str) -> Result<(), (&'static str, &'static str)> {
    if name.contains('*') {
        return Err((
            "the name of a host without `*`",
            "authorities look for those in DNS only: order it by another program, and name its files in a [[certificate]]",
        ));
    }
    let is_name = name.len() <= MAX_NAME_BYTES && name.split('.').all(is_label);
    let is_address =
        name.rsplit('.').next().is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()));
    if is_name && !is_address {
        Ok(())
    } else {
        Err(("the name of a host", "for example \"www.example.org\""))
    }
}

/// A name or an address.
fn is_host(host: &str) -> bool {
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match address {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => host.len() <= MAX_NAME_BYTES && host.split('.').all(is_label),
    }
}

/// With nobody's name and password in it, and a port that there is.
fn is_plain(authority: &Authority) -> bool {
    let port = authority.as_str().strip_prefix(authority.host());
    port.is_some_and(|port| port.is_empty() || authority.port_u16().is_some_and(|port| port != 0))
}

fn is_label(label: &str) -> bool {
    (1..=MAX_LABEL_BYTES).contains(&label.len())
        && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !label.starts_with('-')
        && !label.ends_with('-')
}

fn is_email(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"<>,;\"".contains(&byte);
    text.bytes().all(is_plain)
        && text.split_once('@').is_some_and(|(user, host)| !user.is_empty() && !host.is_empty())
}
