//! The maps of the kernel programs, by name, with keys and values as types.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::GateError;
use crate::abi;
use crate::gate::lock;
use crate::singles::Singles;

/// Every map that user space reads or writes. Those of a program that could not be loaded are missing.
#[derive(Debug)]
pub(crate) struct Maps {
    by_name: HashMap<String, MapHandle>,
    singles: Mutex<Option<Arc<Singles>>>,
}

impl Maps {
    pub(crate) fn new(by_name: HashMap<String, MapHandle>) -> Self {
        Self { by_name, singles: Mutex::default() }
    }

    /// The blocked IPv4 addresses; `None` before the first of them.
    pub(crate) fn singles(&self) -> Result<Option<Arc<Singles>>, GateError> {
        self.singles_by(Singles::open)
    }

    /// The blocked IPv4 addresses, of which there will be some.
    pub(crate) fn singles_to_fill(&self) -> Result<Arc<Singles>, GateError> {
        let made = self.singles_by(|outer| Singles::open_or_create(outer).map(Some))?;
        made.ok_or(GateError::OtherVersion { missing: "blocked4" })
    }

    fn singles_by(
        &self,
        open: impl FnOnce(&MapHandle) -> Result<Option<Singles>, GateError>,
    ) -> Result<Option<Arc<Singles>>, GateError> {
        let outer = self.get("blocked4")?;
        let mut known = lock(&self.singles);
        if let Some(table) = &*known
            && table.is_current(outer)?
        {
            return Ok(Some(Arc::clone(table)));
        }
        *known = open(outer)?.map(Arc::new);
        Ok(known.clone())
    }

    /// Handles of some of them.
    pub(crate) fn only(&self, names: &[&'static str]) -> Result<Self, GateError> {
        let mut by_name = HashMap::new();
        for name in names {
            let map = MapHandle::try_from(self.get(name)?).map_err(GateError::kernel("opening a map"))?;
            by_name.insert((*name).to_owned(), map);
        }
        Ok(Self::new(by_name))
    }

    pub(crate) fn get(&self, name: &'static str) -> Result<&MapHandle, GateError> {
        self.by_name.get(name).ok_or(GateError::OtherVersion { missing: name })
    }

    pub(crate) fn read<V: FromBytes>(
        &self,
        name: &'static str,
        key: &(impl IntoBytes + Immutable),
    ) -> Result<Option<V>, GateError> {
        let value = self.get(name)?.lookup(key.as_bytes(), MapFlags::ANY);
        let value = value.map_err(GateError::kernel("reading a map"))?;
        value
            .map(|bytes| V::read_from_bytes(&bytes).map_err(|_| GateError::OtherVersion { missing: name }))
            .transpose()
    }

    pub(crate) fn write(
        &self,
        name: &'static str,
        key: &(impl IntoBytes + Immutable),
        value: &(impl IntoBytes + Immutable),
    ) -> Result<(), GateError> {
        let map = self.get(name)?;
        map.update(key.as_bytes(), value.as_bytes(), MapFlags::ANY)
            .map_err(GateError::kernel("writing a map"))
    }

    /// Removes an entry; whether it was there.
    pub(crate) fn remove(
        &self,
        name: &'static str,
        key: &(impl IntoBytes + Immutable),
    ) -> Result<bool, GateError> {
        match self.get(name)?.delete(key.as_bytes()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(GateError::kernel("removing from a map")(error)),
        }
    }

    pub(crate) fn control(&self, key: abi::tg_control) -> Result<u64, GateError> {
        Ok(self.read("control", &key)?.unwrap_or(0))
    }

    pub(crate) fn set_control(&self, key: abi::tg_control, value: u64) -> Result<(), GateError> {
        self.write("control", &key, &value)
    }

    /// A counter, summed over the processors.
    pub(crate) fn counter(&self, key: abi::tg_counter) -> Result<u64, GateError> {
        self.per_cpu("counters", &key)
    }

    /// A value of which each processor has a part, summed.
    pub(crate) fn per_cpu(&self, name: &'static str, key: &u32) -> Result<u64, GateError> {
        let values = self
            .get(name)?
            .lookup_percpu(key.as_bytes(), MapFlags::ANY)
            .map_err(GateError::kernel("reading counters"))?;
        let values = values.unwrap_or_default();
        Ok(values.iter().filter_map(|bytes| u64::read_from_bytes(bytes).ok()).sum())
    }
}

/// Creates a map that one rule set puts into a map of maps.
pub(crate) fn create_inner(
    kind: MapType,
    name: &str,
    key_bytes: usize,
    value_bytes: usize,
    max_entries: u32,
) -> Result<MapHandle, GateError> {
    let map_flags = if matches!(kind, MapType::LpmTrie | MapType::Hash) {
        libbpf_rs::libbpf_sys::BPF_F_NO_PREALLOC
    } else {
        0
    };
    let options = libbpf_rs::libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_rs::libbpf_sys::bpf_map_create_opts>() as libbpf_rs::libbpf_sys::size_t,
        map_flags,
        ..Default::default()
    };
    MapHandle::create(kind, Some(name), key_bytes as u32, value_bytes as u32, max_entries, &options)
        .map_err(GateError::kernel("creating a map"))
}

/// Writes many entries at once.
pub(crate) fn write_many<K, V>(map: &MapHandle, entries: &[(K, V)]) -> Result<(), GateError>
where
    K: IntoBytes + Immutable,
    V: IntoBytes + Immutable,
{
    // The kernel copies a batch entry by entry; this only bounds the buffers here.
    const BATCH: usize = 4096;
    for batch in entries.chunks(BATCH) {
        let keys: Vec<u8> = batch.iter().flat_map(|(key, _)| key.as_bytes()).copied().collect();
        let values: Vec<u8> = batch.iter().flat_map(|(_, value)| value.as_bytes()).copied().collect();
        map.update_batch(&keys, &values, batch.len() as u32, MapFlags::ANY, MapFlags::ANY)
            .map_err(GateError::kernel("writing a map"))?;
    }
    Ok(())
}
