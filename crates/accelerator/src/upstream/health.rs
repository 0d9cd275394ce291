//! Active health checks: a request to every server at a fixed interval.

use std::rc::Rc;
use std::sync::Arc;

use tidegate_http::{BodyFraming, Method};

use crate::settings::HealthCheck;
use crate::upstream::exchange::{Arrivals, ExchangeLimits, OutgoingRequest, exchange};
use crate::upstream::groups::{Group, Groups, Server};
use crate::upstream::pool::connect;
use crate::upstream::{EmptyBody, UpstreamError};

/// Checks every group that asks for it, until it is dropped. Runs on one data core.
pub(crate) async fn run_health_checks(groups: Arc<Groups>) {
    let mut checks = tokio::task::JoinSet::new();
    for (index, group) in groups.iter().enumerate() {
        let Some(check) = group.settings.health_check.clone() else { continue };
        for server in 0..group.servers.len() {
            let (groups, check, name) = (Arc::clone(&groups), check.clone(), group.settings.name.clone());
            checks.spawn_local(async move {
                let mut interval = tokio::time::interval(check.interval);
                // So many checks in a row have said something else than what holds.
                let mut against = 0;
                loop {
                    interval.tick().await;
                    let Some(group) = groups.get(index) else { return };
                    let Some(server) = group.servers.get(server) else { return };
                    let result = tokio::time::timeout(check.timeout, ask(group, server, &check)).await;
                    let error = match result {
                        Ok(Ok(status)) if check.status.map_or(status < 400, |wanted| status == wanted) => {
                            None
                        }
                        Ok(Ok(status)) => Some(format!("status {status}")),
                        // It could not be asked, which says nothing of it.
                        Ok(Err(UpstreamError::Exhausted(_))) => continue,
                        Ok(Err(error)) => Some(error.to_string()),
                        Err(_) => Some("no answer in time".to_owned()),
                    };
                    let enough = if error.is_some() { check.fall } else { check.rise };
                    against = if error.is_none() == server.passes_checks() { 0 } else { against + 1 };
                    if against >= enough {
                        against = 0;
                        server.checked(&name, error);
                    }
                }
            });
        }
    }
    while checks.join_next().await.is_some() {}
}

async fn ask(group: &Group, server: &Server, check: &HealthCheck) -> Result<u16, UpstreamError> {
    let stream = Rc::new(connect(group, server, check.timeout).await?);
    let host = check.host.clone().unwrap_or_else(|| server.address.host());
    let head = format!(
        "GET {} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: tidegate-health-check\r\nConnection: close\r\n\r\n",
        check.path
    );
    let request = OutgoingRequest {
        head: head.as_bytes(),
        method: Method::Get,
        client: None,
        class: 0,
        framing: BodyFraming::None,
        hash: 0,
        upgrade: None,
        passes_trailers: false,
    };
    let arrivals = Arrivals::default();
    let limits = ExchangeLimits { silence: check.timeout, arrivals: &arrivals };
    let received = exchange(&stream, &request, &mut EmptyBody, limits).await?;
    Ok(received.head.get().status)
}
