/// A port of 127.0.0.1 that stays this process's own until it ends.
///
/// # Panics
/// When there is none left.
pub fn free_port() -> u16 {
    tidegate_ports::free_port().unwrap()
}
