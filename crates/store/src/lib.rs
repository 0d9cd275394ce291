//! tidegate-store
