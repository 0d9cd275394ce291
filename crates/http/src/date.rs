//! HTTP dates (RFC 9110 §5.6.7).

/// The time that two-digit years are read against when the caller has no clock: 1 January 2026.
const REFERENCE_S: u64 = 1_767_225_600;
/// The last second that IMF-fixdate can express.
const LAST_S: u64 = 253_402_300_799;

const SECONDS_PER_DAY: i64 = 86_400;

const WEEKDAYS: [&[u8; 3]; 7] = [b"Mon", b"Tue", b"Wed", b"Thu", b"Fri", b"Sat", b"Sun"];
const LONG_WEEKDAYS: [&[u8]; 7] =
    [b"Monday", b"Tuesday", b"Wednesday", b"Thursday", b"Friday", b"Saturday", b"Sunday"];
const MONTHS: [&[u8; 3]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

/// Reads a date in any of the three forms: seconds since 1970, 0 for anything earlier.
///
/// Strict but for the case of letters, as RFC 9110 §5.6.7 encourages. Two-digit years are read as of 2026; use
/// [`parse_at`] where the time is known.
pub fn parse(value: &[u8]) -> Option<u64> {
    parse_at(value, REFERENCE_S)
}

/// Reads a date in any of the three forms: seconds since 1970, 0 for anything earlier.
///
/// A two-digit year that would lie more than 50 years after `now_s` is one of the past.
pub fn parse_at(value: &[u8], now_s: u64) -> Option<u64> {
    match value.get(3)? {
        b',' => imf_fixdate(value),
        b' ' => asctime(value),
        _ => rfc850(value, now_s),
    }
}

/// `Sun, 06 Nov 1994 08:49:37 GMT`
fn imf_fixdate(value: &[u8]) -> Option<u64> {
    let value: &[u8; 29] = value.try_into().ok()?;
    if !is_weekday(&value[..3])
        || value[4] != b' '
        || value[7] != b' '
        || value[11] != b' '
        || !value[25..].eq_ignore_ascii_case(b" GMT")
    {
        return None;
    }
    let year = i64::from(two_digits(&value[12..14])?) * 100 + i64::from(two_digits(&value[14..16])?);
    seconds(year, month(&value[8..11])?, two_digits(&value[5..7])?, time_of_day(&value[16..25])?)
}

/// `Sunday, 06-Nov-94 08:49:37 GMT`
fn rfc850(value: &[u8], now_s: u64) -> Option<u64> {
    let comma = value.iter().position(|&byte| byte == b',')?;
    let (weekday, rest) = value.split_at(comma);
    let rest: &[u8; 24] = rest.try_into().ok()?;
    if !LONG_WEEKDAYS.iter().any(|name| name.eq_ignore_ascii_case(weekday))
        || rest[1] != b' '
        || rest[4] != b'-'
        || rest[8] != b'-'
        || !rest[20..].eq_ignore_ascii_case(b" GMT")
    {
        return None;
    }
    let (month, day) = (month(&rest[5..8])?, two_digits(&rest[2..4])?);
    let time = time_of_day(&rest[11..20])?;
    let (now_year, ..) = civil((now_s.min(LAST_S) / 86_400) as i64);
    let of_century = i64::from(two_digits(&rest[9..11])?);
    let mut year = now_year - now_year.rem_euclid(100) + of_century;
    // The latest year with these digits that is at most 50 years ahead.
    if year + 100 <= now_year + 50 {
        year += 100;
    }
    if year > now_year + 50
        || (year == now_year + 50 && seconds(year, month, day, time)? > in_50_years(now_s))
    {
        year -= 100;
    }
    seconds(year, month, day, time)
}

fn in_50_years(now_s: u64) -> u64 {
    let now_s = now_s.min(LAST_S);
    let (year, month, day) = civil((now_s / 86_400) as i64);
    // 29 February has no counterpart in most years; the day before is as good a limit.
    let day = if month == 2 { day.min(28) } else { day };
    (days_of(year + 50, month, day) * SECONDS_PER_DAY) as u64 + now_s % 86_400
}

/// `Sun Nov  6 08:49:37 1994`
fn asctime(value: &[u8]) -> Option<u64> {
    let value: &[u8; 24] = value.try_into().ok()?;
    if !is_weekday(&value[..3]) || value[7] != b' ' || value[19] != b' ' {
        return None;
    }
    let day = match value[8] {
        b' ' => digit(value[9])?,
        _ => two_digits(&value[8..10])?,
    };
    let year = i64::from(two_digits(&value[20..22])?) * 100 + i64::from(two_digits(&value[22..24])?);
    seconds(year, month(&value[4..7])?, day, time_of_day(&value[10..19])?)
}

/// ` 08:49:37`, in seconds; a leap second counts as the first one of the next minute.
fn time_of_day(value: &[u8]) -> Option<u32> {
    let value: &[u8; 9] = value.try_into().ok()?;
    if value[0] != b' ' || value[3] != b':' || value[6] != b':' {
        return None;
    }
    let (hour, minute, second) =
        (two_digits(&value[1..3])?, two_digits(&value[4..6])?, two_digits(&value[7..9])?);
    (hour < 24 && minute < 60 && second <= 60).then_some(hour * 3600 + minute * 60 + second)
}

fn seconds(year: i64, month: u32, day: u32, second_of_day: u32) -> Option<u64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        4 | 6 | 9 | 11 => 30,
        2 if leap => 29,
        2 => 28,
        _ => 31,
    };
    if day == 0 || day > days {
        return None;
    }
    let seconds = days_of(year, month, day) * SECONDS_PER_DAY + i64::from(second_of_day);
    Some(seconds.max(0) as u64)
}

fn digit(byte: u8) -> Option<u32> {
    byte.is_ascii_digit().then(|| u32::from(byte - b'0'))
}

fn two_digits(value: &[u8]) -> Option<u32> {
    match *value {
        [tens, ones] => Some(digit(tens)? * 10 + digit(ones)?),
        _ => None,
    }
}

fn month(value: &[u8]) -> Option<u32> {
    Some(match &lower_case(value)? {
        b"jan" => 1,
        b"feb" => 2,
        b"mar" => 3,
        b"apr" => 4,
        b"may" => 5,
        b"jun" => 6,
        b"jul" => 7,
        b"aug" => 8,
        b"sep" => 9,
        b"oct" => 10,
        b"nov" => 11,
        b"dec" => 12,
        _ => return None,
    })
}

fn is_weekday(value: &[u8]) -> bool {
    let lower = lower_case(value);
    lower.is_some_and(|name| matches!(&name, b"mon" | b"tue" | b"wed" | b"thu" | b"fri" | b"sat" | b"sun"))
}

/// Three letters; nothing else becomes a letter by this bit.
fn lower_case(value: &[u8]) -> Option<[u8; 3]> {
    let name: [u8; 3] = value.try_into().ok()?;
    Some(name.map(|byte| byte | 0x20))
}

/// Days from 1970-01-01 in the proleptic Gregorian calendar; years begin in March so that the leap day comes last.
fn days_of(year: i64, month: u32, day: u32) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let month_from_march = i64::from((month + 9) % 12);
    let day_of_year = (153 * month_from_march + 2) / 5 + i64::from(day) - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// Year, month and day of a day counted from 1970-01-01.
fn civil(days: i64) -> (i64, u32, u32) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = (day_of_year - (153 * month_from_march + 2) / 5 + 1) as u32;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 } as u32;
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// IMF-fixdate of a time in seconds since 1970; times after the year 9999 are given as its end.
pub fn format(unix_s: u64) -> [u8; 29] {
    let unix_s = unix_s.min(LAST_S);
    let days = (unix_s / 86_400) as i64;
    let second = unix_s % 86_400;
    let (year, month, day) = civil(days);
    let mut out = *b"Thu, 01 Jan 1970 00:00:00 GMT";
    // 1 January 1970 was a Thursday.
    out[..3].copy_from_slice(WEEKDAYS[((days + 3) % 7) as usize]);
    put_two_digits(&mut out[5..7], u64::from(day));
    out[8..11].copy_from_slice(MONTHS[month as usize - 1]);
    put_two_digits(&mut out[12..14], year as u64 / 100);
    put_two_digits(&mut out[14..16], year as u64 % 100);
    put_two_digits(&mut out[17..19], second / 3600);
    put_two_digits(&mut out[20..22], second / 60 % 60);
    put_two_digits(&mut out[23..25], second % 60);
    out
}

fn put_two_digits(out: &mut [u8], number: u64) {
    out[0] = b'0' + (number / 10) as u8;
    out[1] = b'0' + (number % 10) as u8;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn all_three_forms_give_the_same_second() {
        for text in
            ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
        {
            assert_eq!(parse(text.as_bytes()), Some(784_111_777), "{text}");
        }
        assert_eq!(parse(b"Sun Nov 16 08:49:37 1994"), Some(784_975_777));
    }

    #[test]
    fn days_that_are_special_are_right() {
        for (text, expected) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Tue, 29 Feb 2000 12:00:00 GMT", 951_825_600),
            ("Tue, 19 Jan 2038 03:14:08 GMT", 1 << 31),
            ("Fri, 31 Dec 9999 23:59:59 GMT", LAST_S),
            ("Mon, 01 Jan 0001 00:00:00 GMT", 0),
            // RFC 9110 §5.6.7 permits a leap second.
            ("Sat, 31 Dec 2016 23:59:60 GMT", 1_483_228_800),
        ] {
            assert_eq!(parse(text.as_bytes()), Some(expected), "{text}");
        }
    }

    #[test]
    fn the_case_of_letters_does_not_matter() {
        for text in [
            "sun, 06 nov 1994 08:49:37 gmt",
            "SUN, 06 NOV 1994 08:49:37 GMT",
            "sunday, 06-NOV-94 08:49:37 Gmt",
            "SUN Nov  6 08:49:37 1994",
        ] {
            assert_eq!(parse(text.as_bytes()), Some(784_111_777), "{text:?}");
        }
    }

    #[test]
    fn anything_else_is_no_date() {
        for text in [
            "",
            "0",
            "-1",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Nov 1994 08:49:37 UTC",
            "Sun, 06-Nov-1994 08:49:37 GMT",
            "Sun 06 Nov 1994 08:49:37 GMT",
            "Sun, 6 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 94 08:49:37 GMT",
            "Sun, 06 Nov 1994 8:49:37 GMT",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 06 Nov 1994 08.49.37 GMT",
            "Wed, 29 Feb 2023 00:00:00 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37 GMT ",
            "Sunday, 06-Nov-1994 08:49:37 GMT",
            "Someday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov 6 08:49:37 1994",
            "Sun Nov  6 08:49:37 94",
        ] {
            assert_eq!(parse(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn two_digit_years_lie_at_most_50_years_ahead() {
        let now = parse(b"Thu, 01 Jan 2026 00:00:00 GMT").unwrap();
        assert_eq!(now, REFERENCE_S);
        let year = |text: &str, now| {
            let text = format!("Monday, {text} 00:00:00 GMT");
            civil((parse_at(text.as_bytes(), now).unwrap() / 86_400) as i64).0
        };
        assert_eq!(year("01-Jan-26", now), 2026);
        assert_eq!(year("31-Dec-75", now), 2075);
        assert_eq!(year("01-Jan-76", now), 2076);
        assert_eq!(year("02-Jan-76", now), 1976);
        assert_eq!(year("01-Jan-99", now), 1999);
        let later = parse(b"Sat, 01 Jan 2095 00:00:00 GMT").unwrap();
        assert_eq!(year("01-Jan-10", later), 2110);
        assert_eq!(year("01-Jan-94", later), 2094);
    }

    proptest! {
        #[test]
        fn what_is_formatted_reads_back(second in 0..=LAST_S) {
            prop_assert_eq!(parse(&format(second)), Some(second));
        }

        #[test]
        fn no_bytes_make_it_panic(value in prop::collection::vec(any::<u8>(), 0..40), now_s in any::<u64>()) {
            let _ = parse_at(&value, now_s);
            let _ = format(now_s);
        }

        #[test]
        fn no_digits_make_it_panic(value in "[A-Z][a-z]{2,8},? [0-9]{2}[- ][JFMASOND][a-z]{2}[- ][0-9]{2,4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT", now_s in any::<u64>()) {
            let _ = parse_at(value.as_bytes(), now_s);
        }
    }
}
