//! The C library of connection conditioning.
