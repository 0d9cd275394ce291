//! Loading the kernel programs, sharing their maps, and attaching them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::time::Duration;

use libbpf_rs::{
    AsRawLibbpf, ErrorKind, Link, MapCore, MapHandle, Object, ObjectBuilder, PrintLevel, ProgramInput,
    XdpFlags, libbpf_sys,
};

use zerocopy::IntoBytes;

use crate::GateError;
use crate::abi;
use crate::maps::Maps;
use crate::report::Mechanism;
use crate::running::Running;
use crate::system;

/// An object file must lie at an address that its headers can be read from.
#[repr(align(16))]
struct Aligned<B: ?Sized>(B);

static INGRESS: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/ingress.bpf.o")));
static STEER: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/steer.bpf.o")));
static REQUEST: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/request.bpf.o")));
static ANSWER: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/answer.bpf.o")));
static EVENTS: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/events.bpf.o")));
static SHARE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/share.bpf.o")));

/// Names of the programs.
pub(crate) const INGRESS_PROGRAM: &str = "tidegate_in";
pub(crate) const STEER_PROGRAM: &str = "tidegate_steer";
pub(crate) const REQUEST_PROGRAM: &str = "tidegate_url";
pub(crate) const ANSWER_PROGRAM: &str = "tidegate_out";
const SHARE_PROGRAM: &str = "tidegate_take";

/// The programs that are loaded, and why the others are not.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) maps: Maps,
    ingress: Object,
    steer: Result<Object, GateError>,
    request: Result<Object, GateError>,
    share: Object,
    answer: Result<Object, GateError>,
    events: Result<Object, GateError>,
}

impl Programs {
    /// Loads what this kernel takes. Only without the first program there is no gate at all.
    pub(crate) fn load() -> Result<Self, GateError> {
        let mut shared = HashMap::new();
        let ingress = load("tidegate_ingress", &INGRESS.0, &mut shared)?;
        let steer = load("tidegate_steer", &STEER.0, &mut shared);
        let request = load("tidegate_request", &REQUEST.0, &mut shared);
        let share = load("tidegate_share", &SHARE.0, &mut shared)?;
        let answer = load("tidegate_answer", &ANSWER.0, &mut shared);
        let events = load("tidegate_events", &EVENTS.0, &mut shared);
        let programs = Self { maps: Maps::new(shared), ingress, steer, request, share, answer, events };
        programs.bind("labels")?;
        programs.bind("reasons")?;
        Ok(programs)
    }

    pub(crate) fn steer(&self) -> Result<&Object, &GateError> {
        self.steer.as_ref()
    }

    pub(crate) fn request(&self) -> Result<&Object, &GateError> {
        self.request.as_ref()
    }

    /// Attaches to an interface; the links detach when they are dropped, and so when the process ends.
    pub(crate) fn attach(&self, interface: &str) -> Result<Attached, GateError> {
        system::check_interface(interface)?;
        let index = system::interface_index(interface)?;
        let (ingress, not_native) = self.attach_ingress(interface, index)?;
        let request = match &self.request {
            Err(error) => Err(error.to_string()),
            Ok(object) => attach_tcx(object, REQUEST_PROGRAM, index).map_err(|error| error.to_string()),
        };
        let answer = match &self.answer {
            Err(error) => Err(error.to_string()),
            Ok(object) => attach_tcx(object, ANSWER_PROGRAM, index).map_err(|error| error.to_string()),
        };
        Ok(Attached { interface: interface.to_owned(), index, ingress, not_native, request, answer })
    }

    /// Attaches to the driver's hook, or where the driver will not have it (its queues or features do not fit) to the
    /// kernel's own behind it; then also gives what the driver said.
    fn attach_ingress(&self, name: &str, index: i32) -> Result<(OwnedFd, Option<String>), GateError> {
        let attachable = program(&self.ingress, INGRESS_PROGRAM)?;
        let descriptor = attachable.as_fd();
        let native = match system::link_xdp(descriptor, index, 0) {
            Ok(link) => return Ok((link, None)),
            Err(error) => error,
        };
        let other = libbpf_rs::Xdp::new(descriptor).query_id(index, XdpFlags::NONE);
        if other.is_ok_and(|program| program != 0) {
            let by_tidegate = Running::all(Some(name)).is_ok_and(|found| !found.is_empty());
            return Err(GateError::InUse { name: name.into(), by_tidegate });
        }
        match system::link_xdp(descriptor, index, libbpf_sys::XDP_FLAGS_SKB_MODE) {
            Ok(link) => Ok((link, Some(native.to_string()))),
            Err(_) => Err(GateError::NotTaken { name: name.into(), source: native }),
        }
    }

    /// Attaches the steering of new connections to the calling thread's network namespace.
    pub(crate) fn attach_steering(&self) -> Result<Link, String> {
        let object = self.steer.as_ref().map_err(ToString::to_string)?;
        let namespace =
            File::open("/proc/thread-self/ns/net").map_err(|error| format!("network namespace: {error}"))?;
        let program = program(object, STEER_PROGRAM).map_err(|error| error.to_string())?;
        program.attach_netns(namespace.as_raw_fd()).map_err(|error| error.to_string())
    }

    /// Runs a program on a frame, `repeat` times; gives its verdict and the mean time.
    pub(crate) fn run(
        &self,
        mechanism: Mechanism,
        frame: &[u8],
        repeat: u32,
    ) -> Result<(u32, Duration), GateError> {
        let program = match (mechanism, &self.request) {
            (Mechanism::Xdp, _) => program(&self.ingress, INGRESS_PROGRAM)?,
            (Mechanism::Tc, Ok(object)) => program(object, REQUEST_PROGRAM)?,
            (Mechanism::Tc, Err(why)) => {
                return Err(GateError::Unavailable {
                    what: "the program for segments",
                    why: why.to_string(),
                });
            }
            (Mechanism::Accept | Mechanism::Server | Mechanism::Nobody, _) => {
                return Err(GateError::Unavailable { what: "a program", why: "this is user space".into() });
            }
        };
        let input = ProgramInput { data_in: Some(frame), repeat, ..Default::default() };
        let output = program.test_run(input).map_err(GateError::kernel("running a program on a frame"))?;
        Ok((output.return_value, output.duration))
    }

    /// What each program that is loaded cost the verifier.
    pub(crate) fn costs(&self) -> Result<Vec<ProgramCost>, GateError> {
        let mut costs = Vec::new();
        let optional = [&self.steer, &self.request, &self.answer, &self.events];
        for object in [&self.ingress, &self.share].into_iter().chain(optional.into_iter().flatten()) {
            for program in object.progs() {
                let (verified, bytes) = system::program_size(program.as_fd())?;
                let name = program.name().to_string_lossy().into_owned();
                costs.push(ProgramCost { name, verified, instructions: bytes / 8 });
            }
        }
        Ok(costs)
    }

    /// Attaches the programs that tell of TCP events.
    pub(crate) fn attach_events(&self) -> Result<Vec<Link>, GateError> {
        let unavailable = |why: String| GateError::Unavailable { what: "the telling of TCP events", why };
        let object = self.events.as_ref().map_err(|error| unavailable(error.to_string()))?;
        let attach = |program: libbpf_rs::ProgramMut<'_>| program.attach_trace();
        object
            .progs_mut()
            .map(attach)
            .collect::<Result<_, _>>()
            .map_err(|error| unavailable(error.to_string()))
    }

    /// Whether a request that a server has parsed is compliant: policed on its segment before, or policed now.
    pub(crate) fn ask(&self, question: &abi::tg_question) -> Result<bool, GateError> {
        let program = program(&self.share, SHARE_PROGRAM)?;
        let input = ProgramInput { data_in: Some(question.as_bytes()), ..Default::default() };
        let output = program.test_run(input).map_err(GateError::kernel("policing a request"))?;
        Ok(output.return_value != 0)
    }

    /// No program reads these maps, so the kernel has to be told that they belong to one: [`crate::Running`] finds the
    /// maps by the program.
    fn bind(&self, map: &'static str) -> Result<(), GateError> {
        let program = program(&self.ingress, INGRESS_PROGRAM)?;
        let map = self.maps.get(map)?;
        // SAFETY: both descriptors are open for the duration of the call; no options are passed.
        let status = unsafe {
            libbpf_sys::bpf_prog_bind_map(program.as_fd().as_raw_fd(), map.as_fd().as_raw_fd(), ptr::null())
        };
        system::check(status, "binding a map")
    }
}

/// What a program cost the verifier, which gives up at a million instructions.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ProgramCost {
    /// The program.
    pub name: String,
    /// Instructions that the verifier went through, along every path.
    pub verified: u32,
    /// Instructions of the program.
    pub instructions: u32,
}

/// Links to one interface.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) interface: String,
    pub(crate) index: i32,
    pub(crate) ingress: OwnedFd,
    /// Why the driver did not take the program; the kernel runs it behind the driver then.
    pub(crate) not_native: Option<String>,
    pub(crate) request: Result<Link, String>,
    pub(crate) answer: Result<Link, String>,
}

pub(crate) fn program<'o>(
    object: &'o Object,
    name: &'static str,
) -> Result<libbpf_rs::ProgramMut<'o>, GateError> {
    object.progs_mut().find(|program| program.name() == name).ok_or(GateError::OtherVersion { missing: name })
}

/// TCX links are since Linux 6.6; the classic way would stay attached after a crash.
fn attach_tcx(object: &Object, name: &'static str, index: i32) -> Result<Link, GateError> {
    let program = program(object, name)?;
    // SAFETY: the program is loaded and outlives the call; no options are passed.
    let link = unsafe {
        libbpf_sys::bpf_program__attach_tcx(program.as_libbpf_object().as_ptr(), index, ptr::null())
    };
    match NonNull::new(link) {
        // SAFETY: the link was just made and nothing else owns it.
        Some(link) => Ok(unsafe { Link::from_ptr(link) }),
        None => Err(GateError::io("attaching to TC (Linux 6.6)")(std::io::Error::last_os_error())),
    }
}

fn load(
    name: &'static str,
    object: &[u8],
    shared: &mut HashMap<String, MapHandle>,
) -> Result<Object, GateError> {
    let captured = Captured::begin();
    let explain = |source: libbpf_rs::Error| match source.kind() {
        ErrorKind::PermissionDenied if !system::may_load_programs() => GateError::NotPermitted,
        _ => GateError::Kernel {
            doing: "loading the kernel programs (Linux 6.1 with BTF, or later)",
            source,
            detail: captured.text(),
        },
    };
    let mut builder = ObjectBuilder::default();
    let mut open = builder.name(name).and_then(|builder| builder.open_memory(object)).map_err(explain)?;
    for mut map in open.maps_mut() {
        if let Some(known) = map.name().to_str().and_then(|name| shared.get(name)) {
            map.reuse_fd(known.as_fd()).map_err(GateError::kernel("sharing a map"))?;
        }
    }
    let loaded = open.load().map_err(explain)?;
    for map in loaded.maps() {
        let name = map.name().to_string_lossy().into_owned();
        // Constants of a program are its own.
        if !name.contains('.') {
            let handle = MapHandle::try_from(&map).map_err(GateError::kernel("opening a map"))?;
            shared.entry(name).or_insert(handle);
        }
    }
    Ok(loaded)
}

thread_local! {
    static SAID: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Keeps what libbpf would print to standard error, so that it becomes part of the error.
struct Captured;

impl Captured {
    /// The last lines of the verifier's log say what it refused.
    const LINES: usize = 12;

    fn begin() -> Self {
        libbpf_rs::set_print(Some((PrintLevel::Warn, |_, line| {
            SAID.with_borrow_mut(|said| {
                if let Some(said) = said {
                    said.push(line);
                }
            });
        })));
        SAID.set(Some(Vec::new()));
        Self
    }

    fn text(&self) -> String {
        SAID.with_borrow(|said| {
            let text = said.as_deref().unwrap_or_default().concat();
            let lines: Vec<&str> = text.lines().collect();
            let first = lines.len().saturating_sub(Self::LINES);
            lines[first..].iter().map(|line| format!("\n  {line}")).collect()
        })
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        SAID.set(None);
    }
}
