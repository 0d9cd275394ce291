//! Socket addresses in the C library's form.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use libc::{c_int, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};

/// An internet address in its structure; `None` for other families.
///
/// # Safety
/// `address` is NULL or points to `length` readable bytes.
pub unsafe fn read(address: *const sockaddr, length: socklen_t) -> Option<SocketAddr> {
    if address.is_null() || (length as usize) < size_of::<sockaddr_in>() {
        return None;
    }
    // SAFETY: as the caller promises; the family says which structure they are.
    unsafe {
        match c_int::from((*address).sa_family) {
            libc::AF_INET => {
                let v4 = &*address.cast::<sockaddr_in>();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::new(ip.into(), u16::from_be(v4.sin_port)))
            }
            libc::AF_INET6 if length as usize >= size_of::<sockaddr_in6>() => {
                let v6 = &*address.cast::<sockaddr_in6>();
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some(SocketAddr::new(ip.into(), u16::from_be(v6.sin6_port)))
            }
            _ => None,
        }
    }
}

/// Writes an address as accept(2) does: cut to the caller's length, with the full length reported.
///
/// # Safety
/// `address` and `length` are NULL, or `address` points to `*length` writable bytes.
pub unsafe fn write(value: SocketAddr, address: *mut sockaddr, length: *mut socklen_t) {
    if address.is_null() || length.is_null() {
        return;
    }
    let put = |source: *const u8, size: usize| {
        // SAFETY: as the caller promises; no more than `size` are read.
        unsafe {
            std::ptr::copy_nonoverlapping(source, address.cast::<u8>(), size.min(*length as usize));
            *length = size as socklen_t;
        }
    };
    match value.ip() {
        IpAddr::V4(ip) => {
            let v4 = sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: value.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(ip).to_be() },
                sin_zero: [0; 8],
            };
            put((&raw const v4).cast(), size_of::<sockaddr_in>());
        }
        IpAddr::V6(ip) => {
            let v6 = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: value.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: ip.octets() },
                sin6_scope_id: 0,
            };
            put((&raw const v6).cast(), size_of::<sockaddr_in6>());
        }
    }
}

/// An address as a socket shows it whose listening socket is an IPv6 one, or is not. A server that listens for IPv4 has
/// no room for another address: nginx closes such a connection at once.
pub(crate) fn presented(address: SocketAddr, as_v6: bool) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(v4) if as_v6 => v4.to_ipv6_mapped().into(),
        IpAddr::V6(v6) if !as_v6 => v6.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED).into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_presented_in_the_listening_sockets_family() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(presented(at("127.0.0.1:5"), true), at("[::ffff:127.0.0.1]:5"));
        assert_eq!(presented(at("[::ffff:127.0.0.1]:5"), true), at("[::ffff:127.0.0.1]:5"));
        assert_eq!(presented(at("[::ffff:127.0.0.1]:5"), false), at("127.0.0.1:5"));
        assert_eq!(presented(at("[::1]:5"), true), at("[::1]:5"));
        assert_eq!(presented(at("[::1]:5"), false), at("0.0.0.0:5"));
    }
}
