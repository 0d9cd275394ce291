//! `prior`: the least recently served address range is served next (§4.2.1).

use std::time::Instant;

use tidegate_core::metrics::Sample;

use crate::arguments::{Argument, Arguments};
use crate::host::{Disposition, Filter};
use crate::neighbours::FilterError;
use crate::tree::AddressTree;
use crate::wire::{Bundle, Id};

pub(super) const ARGUMENTS: &[Argument] = &[
    Argument {
        key: "window",
        default: "0",
        help: "bytes that the server may have unread when it is handed more; 0: one request at a time, so that the order is exact",
    },
    Argument {
        key: "nodes",
        default: "262144",
        help: "nodes of the address tree beyond which history is pruned",
    },
];

/// Holds all requests, and hands on that of the range which was served least recently.
#[derive(Debug)]
pub struct Prior {
    tree: AddressTree<Id>,
}

impl Prior {
    /// Prunes its history beyond `most_nodes` nodes.
    pub fn new(most_nodes: usize) -> Self {
        Self { tree: AddressTree::new(most_nodes) }
    }
}

impl Filter for Prior {
    fn name(&self) -> &'static str {
        "prior"
    }

    fn arrive(&mut self, request: &mut Bundle, _now: Instant) -> Disposition {
        self.tree.insert(request.peer.ip(), request.id);
        Disposition::Hold
    }

    fn pick(&mut self, _now: Instant) -> Option<Id> {
        self.tree.pop_least_recent().map(|(_, id)| id)
    }

    fn holds(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        use tidegate_core::metrics::Kind;
        let gauge = |name, help, value: usize| Sample { name, help, kind: Kind::Gauge, value: value as u64 };
        vec![
            gauge("waiting", "Requests that wait to be served.", self.tree.len()),
            gauge("nodes", "Nodes of the address tree.", self.tree.nodes()),
        ]
    }
}

pub(super) fn check(arguments: &Arguments) -> Result<Prior, FilterError> {
    arguments.number::<usize>("window")?;
    Ok(Prior::new(arguments.positive("nodes")?))
}
