//! A gate that another process holds, found by its programs: no file, socket or pinned object is needed, and so none
//! can be left behind.

use std::collections::HashMap;

use libbpf_rs::query::{LinkInfo, LinkTypeInfo, ProgInfoIter, ProgInfoQueryOptions, ProgramInfo};
use libbpf_rs::{MapCore, MapHandle};

use crate::abi;
use crate::block::Blocks;
use crate::kernel::{ANSWER_PROGRAM, INGRESS_PROGRAM, REQUEST_PROGRAM, STEER_PROGRAM};
use crate::maps::Maps;
use crate::report::{self, Report, Unavailable};
use crate::{GateError, system};

/// A gate attached in the calling thread's network namespace.
#[derive(Debug)]
pub struct Running {
    maps: Maps,
    interfaces: Vec<String>,
    links: Vec<OneLink>,
    segments: bool,
}

/// What is attached.
#[derive(Debug)]
struct OneLink {
    id: u32,
    /// The interface it is attached to; `None`: to no interface.
    index: Option<u32>,
}

impl Running {
    /// Finds the gate attached to `interface`, or one that is attached to any.
    pub fn find(interface: Option<&str>) -> Result<Self, GateError> {
        let missing = || GateError::NotAttached { interface: interface.map(str::to_owned) };
        Self::all(interface)?.into_iter().next().ok_or_else(missing)
    }

    /// Finds every gate attached to `interface`, or to any: each is another process's.
    pub fn all(interface: Option<&str>) -> Result<Vec<Self>, GateError> {
        if !system::may_open_by_number() {
            return Err(GateError::MayNotFind);
        }
        let wanted = interface.map(system::interface_index).transpose()?;
        let cookie = system::namespace_cookie()?;
        // Programs after links: what is attached has all its maps, what is only being loaded has not.
        let mut links = system::links();
        let programs = our_programs();
        links.retain(|link| programs.contains_key(&link.prog_id));
        let mut found: Vec<(u32, Self)> = Vec::new();
        for link in &links {
            let LinkTypeInfo::Xdp(xdp) = &link.info else { continue };
            // Detached, and not let go yet by its holder.
            if xdp.ifindex == 0 || wanted.is_some_and(|index| xdp.ifindex != index as u32) {
                continue;
            }
            let Some(maps) = open_maps(&programs[&link.prog_id])? else { continue };
            // The same number may be another interface in another namespace.
            if maps.control(abi::TG_CONTROL_NETNS)? == cookie {
                let control = map_id(&maps)?;
                if !found.iter().any(|(known, _)| *known == control) {
                    found.push((control, Self::of(maps, control, &programs, &links)));
                }
            }
        }
        Ok(found.into_iter().map(|(_, running)| running).collect())
    }

    fn of(maps: Maps, control: u32, programs: &HashMap<u32, ProgramInfo>, links: &[LinkInfo]) -> Self {
        let mut running = Self { maps, interfaces: Vec::new(), links: Vec::new(), segments: false };
        for link in links.iter().filter(|link| programs[&link.prog_id].map_ids.contains(&control)) {
            let index = match &link.info {
                LinkTypeInfo::Xdp(xdp) => {
                    running.interfaces.extend(system::interface_name(xdp.ifindex));
                    Some(xdp.ifindex)
                }
                LinkTypeInfo::Tcx(tcx) => {
                    running.segments = true;
                    Some(tcx.ifindex)
                }
                _ => None,
            };
            running.links.push(OneLink { id: link.id, index });
        }
        running
    }

    /// The interfaces it is attached to.
    pub fn interfaces(&self) -> &[String] {
        &self.interfaces
    }

    /// Its block list.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks::kernel(&self.maps)
    }

    /// What it enforces, and how.
    pub fn show(&self) -> Result<Report, GateError> {
        let mut unavailable = Vec::new();
        if !self.segments {
            let why = "the process that attached the gate says why in its log".to_owned();
            unavailable.push(Unavailable { what: "request rules on segments", why });
        }
        Ok(Report {
            interfaces: self.interfaces.clone(),
            rules: report::rules(&self.maps)?,
            unavailable,
            totals: report::totals(&self.maps)?,
            blocked: self.blocks().stats()?,
            overloaded: self.maps.control(abi::TG_CONTROL_OVERLOAD)? != 0,
        })
    }

    /// Signals that overload has begun or ended, for the rules that act only then.
    pub fn set_overload(&self, overloaded: bool) -> Result<(), GateError> {
        self.maps.set_control(abi::TG_CONTROL_OVERLOAD, u64::from(overloaded))
    }

    /// Detaches it from every interface. The process that holds it sees that by [`crate::Gate::is_attached`].
    pub fn detach(self) -> Result<(), GateError> {
        detach_all(self.links.iter())
    }

    /// Detaches it from one of its interfaces, and so altogether if it has no other. The process that holds it sees
    /// that by [`crate::Gate::look_at_interfaces`].
    pub fn detach_from(self, interface: &str) -> Result<(), GateError> {
        if !self.interfaces.iter().any(|name| name == interface) {
            return Err(GateError::NotAttached { interface: Some(interface.to_owned()) });
        }
        if self.interfaces.len() == 1 {
            return self.detach();
        }
        let index = u32::try_from(system::interface_index(interface)?).ok();
        detach_all(self.links.iter().filter(|link| link.index == index))
    }
}

/// The holder lets go of an interface's other links as soon as it sees that one is detached.
fn detach_all<'l>(links: impl Iterator<Item = &'l OneLink>) -> Result<(), GateError> {
    for link in links {
        if let Some(link) = system::open_link(link.id)? {
            system::detach_link(&link)?;
        }
    }
    Ok(())
}

fn our_programs() -> HashMap<u32, ProgramInfo> {
    let names = [INGRESS_PROGRAM, REQUEST_PROGRAM, STEER_PROGRAM, ANSWER_PROGRAM];
    // The kernel keeps fifteen bytes of a name.
    let ours = |program: &ProgramInfo| {
        let name = program.name.to_string_lossy();
        names.iter().any(|known| *name == known[..known.len().min(15)])
    };
    let options = ProgInfoQueryOptions::default().include_map_ids(true);
    ProgInfoIter::with_query_opts(options).filter(ours).map(|program| (program.id, program)).collect()
}

/// `None` if the program's holder, of whatever namespace, has ended since its number was read.
fn open_maps(program: &ProgramInfo) -> Result<Option<Maps>, GateError> {
    let mut by_name = HashMap::new();
    for id in &program.map_ids {
        let map = match MapHandle::from_map_id(*id) {
            Ok(map) => map,
            Err(error) if error.kind() == libbpf_rs::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(GateError::kernel("opening a map")(error)),
        };
        by_name.insert(map.name().to_string_lossy().into_owned(), map);
    }
    Ok(Some(Maps::new(by_name)))
}

fn map_id(maps: &Maps) -> Result<u32, GateError> {
    let info = maps.get("control")?.info().map_err(GateError::kernel("reading about a map"))?;
    Ok(info.info.id)
}
