//! What kernel programs and user space share, generated from bpf/include/abi.h.
#![allow(missing_docs, non_camel_case_types, clippy::all, reason = "generated names and code")]

include!(concat!(env!("OUT_DIR"), "/abi.rs"));
