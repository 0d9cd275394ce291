//! What kernel programs and user space share, generated from bpf/include/abi.h.
#![allow(missing_docs, non_camel_case_types, clippy::all, reason = "generated names and code")]
#![allow(dead_code, reason = "some constants are for the kernel programs only")]

include!(concat!(env!("OUT_DIR"), "/abi.rs"));
