//! The preload library of connection conditioning.
