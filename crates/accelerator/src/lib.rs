//! tidegate-accelerator
