//! The interfaces that a gate is attached to. One that goes takes nothing from the others.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::query::{LinkInfo, LinkTypeInfo};

use crate::kernel::{Attached, Programs};
use crate::report::Unavailable;
use crate::{GateError, system};

/// What has become of an interface of a gate.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum InterfaceChange {
    /// It has vanished from this network namespace. It is attached again should one of its name come.
    Gone {
        /// Its name.
        name: String,
    },
    /// It has come back and is attached.
    Back {
        /// Its name.
        name: String,
    },
    /// It has come back and cannot be attached; that is tried again.
    NotBack {
        /// Its name.
        name: String,
        /// Why not.
        why: String,
    },
    /// Another process has detached it ([`crate::Running::detach`]).
    Detached {
        /// Its name.
        name: String,
    },
}

impl InterfaceChange {
    /// Whether the gate protects less than it was asked to.
    pub fn is_fault(&self) -> bool {
        matches!(self, Self::Gone { .. } | Self::NotBack { .. })
    }
}

impl fmt::Display for InterfaceChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone { name } => write!(
                f,
                "interface `{name}` is gone, and nothing is enforced there; it is attached again when it comes back"
            ),
            Self::Back { name } => write!(f, "interface `{name}` is back and attached again"),
            Self::NotBack { name, why } => {
                write!(f, "interface `{name}` is back and cannot be attached: {why}")
            }
            Self::Detached { name } => write!(f, "detached from {name} by another process"),
        }
    }
}

/// The interfaces of one gate: no more than the process was asked to attach to.
#[derive(Debug, Default)]
pub(crate) struct Interfaces {
    attached: Vec<Attached>,
    gone: Vec<Gone>,
}

/// An interface that may come back.
#[derive(Debug)]
struct Gone {
    name: String,
    /// Why it was not attached when it was last tried.
    why: Option<String>,
}

impl Interfaces {
    /// Attaches to one more; to one that is attached already this changes nothing.
    pub(crate) fn attach(&mut self, programs: &Programs, name: &str) -> Result<(), GateError> {
        let index = system::interface_index(name)?;
        if !self.attached.iter().any(|attached| attached.index == index) {
            self.attached.push(programs.attach(name)?);
        }
        Ok(())
    }

    pub(crate) fn attached(&self) -> &[Attached] {
        &self.attached
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.attached.iter().map(|attached| attached.interface.clone()).collect()
    }

    pub(crate) fn include_loopback(&self) -> bool {
        self.attached.iter().any(|attached| attached.interface == "lo")
    }

    /// Whether programs run on one of them.
    pub(crate) fn any_attached(&self) -> bool {
        self.attached.iter().any(|attached| is_attached(&attached.ingress))
    }

    /// Whether one of them has vanished, and is not back.
    pub(crate) fn any_gone(&self) -> bool {
        !self.gone.is_empty()
    }

    /// What a report says of them besides their names.
    pub(crate) fn unavailable(&self) -> impl Iterator<Item = Unavailable> {
        let segments = self.attached.iter().filter_map(|attached| {
            let why = format!("{}: {}", attached.interface, attached.request.as_ref().err()?);
            Some(Unavailable { what: "request rules on segments", why })
        });
        let behind = self.attached.iter().filter_map(|attached| {
            let (name, why) = (&attached.interface, attached.not_native.as_ref()?);
            let why = format!(
                "{name}: {why}: the kernel runs the programs behind the driver, where a packet costs more"
            );
            Some(Unavailable { what: "XDP in the driver", why })
        });
        let gone = self.gone.iter().map(|gone| Unavailable {
            what: "an interface",
            why: match &gone.why {
                None => format!("`{}` is gone; it is attached again when it comes back", gone.name),
                Some(why) => format!("`{}` is back and cannot be attached: {why}", gone.name),
            },
        });
        segments.chain(behind).chain(gone)
    }

    /// Looks what has become of each, and attaches those that are back. Tells each change once.
    pub(crate) fn look(&mut self, programs: &Programs) -> Vec<InterfaceChange> {
        let mut changes = Vec::new();
        for place in (0..self.attached.len()).rev() {
            if is_attached(&self.attached[place].ingress) {
                continue;
            }
            // The kernel takes the programs off an interface that goes; off one that stays somebody else has.
            let Attached { interface: name, index, .. } = self.attached.remove(place);
            if u32::try_from(index).ok().and_then(system::interface_name).is_some() {
                changes.push(InterfaceChange::Detached { name });
            } else {
                self.gone.push(Gone { name: name.clone(), why: None });
                changes.push(InterfaceChange::Gone { name });
            }
        }
        for mut gone in std::mem::take(&mut self.gone) {
            let name = gone.name.clone();
            match self.attach(programs, &name) {
                Ok(()) => changes.push(InterfaceChange::Back { name }),
                Err(GateError::NoInterface { .. }) => {
                    gone.why = None;
                    self.gone.push(gone);
                }
                Err(error) => {
                    let why = error.to_string();
                    if gone.why.as_ref() != Some(&why) {
                        changes.push(InterfaceChange::NotBack { name, why: why.clone() });
                    }
                    gone.why = Some(why);
                    self.gone.push(gone);
                }
            }
        }
        changes
    }
}

fn is_attached(link: &OwnedFd) -> bool {
    match LinkInfo::from_fd(link.as_fd()).map(|link| link.info) {
        Ok(LinkTypeInfo::Xdp(xdp)) => xdp.ifindex != 0,
        _ => false,
    }
}
