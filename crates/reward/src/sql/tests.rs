use std::time::Instant;

use rusqlite::Connection;
use serde_json::json;

use super::*;
use crate::testing::scorer_input;

fn database_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for path in ["shop.sqlite", "zoo/zoo.sqlite"] {
        let path = dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let connection = Connection::open(path).unwrap();
        connection
            .execute_batch(
                "CREATE TABLE item(name TEXT, price REAL, stock INT);
                 INSERT INTO item VALUES ('pen', 1.5, 10), ('ink', 4.0, 0), ('pad', 2.25, 7), \
                 ('pen', 1.5, NULL);",
            )
            .unwrap();
    }
    dir
}

fn scorer(dir: &Path) -> SqlScorer {
    let scorer = SqlScorer {
        databases: dir.to_owned(),
        field: default_database_field(),
        seconds: 5.0,
        rows: 100,
        result_mb: 16,
        columns: Columns::AnyOrder,
    };
    scorer.check().unwrap();
    scorer
}

#[test]
fn missing_keys_have_defaults() {
    let scorer: SqlScorer = serde_json::from_value(json!({ "databases": "shop.sqlite" })).unwrap();
    assert_eq!((scorer.field.as_str(), scorer.seconds), ("db_id", 10.0));
    assert_eq!((scorer.rows, scorer.result_mb, scorer.columns), (10_000, 16, Columns::AnyOrder));
}

fn task(gold: &str) -> Value {
    json!({ "answer": gold, "row": { "db_id": "shop" } })
}

#[tokio::test]
async fn queries_are_compared_by_results() {
    let dir = database_dir();
    let scorer = scorer(dir.path());
    let all = "SELECT name, price FROM item";
    for (gold, answer, score, runs) in [
        (all, "SELECT name, price FROM item ORDER BY price DESC", 1.0, 1.0),
        (all, "```sql\nSELECT name, price FROM item;\n```", 1.0, 1.0),
        (all, "<answer>```sqlite\nSELECT name, price FROM item\n```</answer>", 1.0, 1.0),
        (all, "```sql\nSELECT name, price FROM item\n```\ngives\n```\nnut 1\n```", 1.0, 1.0),
        (all, "So: <answer>select NAME, price + 0 from item</answer>", 1.0, 1.0),
        (all, "SELECT price, name FROM item", 1.0, 1.0),
        (all, "1. So:\n   ~~~sql\n   SELECT name,\n          price FROM item\n   ~~~", 1.0, 1.0),
        (all, "SELECT DISTINCT name, price FROM item", 0.0, 1.0),
        (all, "SELECT name FROM item", 0.0, 1.0),
        (all, "SELECT nam FROM item", 0.0, 0.0),
        (all, "I do not know", 0.0, 0.0),
        (all, "", 0.0, 0.0),
        ("SELECT name FROM item ORDER BY price", "SELECT name FROM item ORDER BY price", 1.0, 1.0),
        (
            "SELECT name FROM item ORDER BY price",
            "SELECT name FROM item ORDER BY price DESC",
            0.0,
            1.0,
        ),
        ("SELECT sum(price) FROM item", "SELECT 9.25", 1.0, 1.0),
        ("SELECT count(*) FROM item", "SELECT 4.0", 1.0, 1.0),
        ("SELECT stock FROM item WHERE stock IS NULL", "SELECT NULL", 1.0, 1.0),
        // Integers must match exactly, in any order of rows.
        ("SELECT 1732600000", "SELECT 1732600001", 0.0, 1.0),
        ("SELECT 9007199254740993", "SELECT 9007199254740992", 0.0, 1.0),
        (
            "SELECT 100000001 UNION ALL SELECT 100000003 UNION ALL SELECT 100000002",
            "SELECT 100000003 UNION ALL SELECT 100000002 UNION ALL SELECT 100000001",
            1.0,
            1.0,
        ),
        // Sums that differ only by rounding do not decide the position of a row.
        (
            "SELECT 0.1 + 0.2, 'a' UNION ALL SELECT 0.3, 'b'",
            "SELECT 0.3, 'a' UNION ALL SELECT 0.1 + 0.2, 'b'",
            1.0,
            1.0,
        ),
        // A floating-point number with an integer value equals that integer, and no integer close
        // to it.
        ("SELECT 1732600000", "SELECT 1732600001.0", 0.0, 1.0),
        ("SELECT 9007199254740993", "SELECT 9007199254740992.0", 0.0, 1.0),
        ("SELECT 2451545.12345", "SELECT 2451545.12346", 0.0, 1.0),
        ("SELECT 3", "SELECT 0.1 * 3 * 10", 1.0, 1.0),
        (
            "SELECT 4, 'a' UNION ALL SELECT 2, 'b'",
            "SELECT 2.0, 'b' UNION ALL SELECT 4.0, 'a'",
            1.0,
            1.0,
        ),
        (
            "SELECT name FROM item WHERE name = 'order by'",
            "SELECT name FROM item WHERE 0",
            1.0,
            1.0,
        ),
    ] {
        let components = scorer.score(&scorer_input(answer, task(gold))).await.unwrap();
        assert_eq!((components[0].value, components[1].value), (score, runs), "{gold}\n{answer}");
    }
}

#[tokio::test]
async fn similar_values_are_distinguished() {
    let dir = database_dir();
    let scorer = scorer(dir.path());
    for (gold, answer, score) in [
        // Texts that are not UTF-8, as in old databases.
        ("SELECT CAST(x'e9' AS TEXT)", "SELECT CAST(x'e9' AS TEXT)", 1.0),
        ("SELECT CAST(x'e9' AS TEXT)", "SELECT CAST(x'e8' AS TEXT)", 0.0),
        ("SELECT CAST(x'e9' AS TEXT)", "SELECT char(65533)", 0.0),
        ("SELECT 'a' || char(0) || 'b'", "SELECT 'a' || char(0) || 'c'", 0.0),
        // An infinity equals no other number.
        ("SELECT avg(price) FROM item", "SELECT 9e999", 0.0),
        ("SELECT 9e999", "SELECT avg(price) FROM item", 0.0),
        ("SELECT 9e999", "SELECT -9e999", 0.0),
        ("SELECT 9e999", "SELECT 1e999", 1.0),
    ] {
        let components = scorer.score(&scorer_input(answer, task(gold))).await.unwrap();
        assert_eq!(components[0].value, score, "{gold}\n{answer}");
    }
}

#[tokio::test]
async fn statements_without_columns_are_not_empty_results() {
    let dir = database_dir();
    let scorer = scorer(dir.path());
    let empty = "SELECT name FROM item WHERE 0";
    for answer in
        ["BEGIN", "SAVEPOINT a", "REINDEX", "PRAGMA foreign_keys = ON", "-- nothing", ";", "COMMIT"]
    {
        let components = scorer.score(&scorer_input(answer, task(empty))).await.unwrap();
        assert_eq!((components[0].value, components[1].value), (0.0, 0.0), "{answer}");
    }
    let components = scorer
        .score(&scorer_input("SELECT price FROM item WHERE price > 99", task(empty)))
        .await
        .unwrap();
    assert_eq!(components[0].value, 1.0);
    assert!(
        scorer
            .check_task(&task("BEGIN"))
            .unwrap_err()
            .to_string()
            .contains("the statement is not a query")
    );
}

#[tokio::test]
async fn column_order_matters_only_if_in_order() {
    let dir = database_dir();
    let any = scorer(dir.path());
    let fixed = SqlScorer { columns: Columns::InOrder, ..any.clone() };
    for (gold, answer, score) in [
        ("SELECT name, price, stock FROM item", "SELECT stock, name, price FROM item", 1.0),
        (
            "SELECT name, stock FROM item ORDER BY price, name",
            "SELECT stock, name FROM item ORDER BY price, name",
            1.0,
        ),
        (
            "SELECT name, stock FROM item ORDER BY price, name",
            "SELECT stock, name FROM item ORDER BY price DESC, name",
            0.0,
        ),
        // All rows must have the same order of columns.
        ("SELECT 1, 2 UNION ALL SELECT 3, 4", "SELECT 2, 1 UNION ALL SELECT 4, 3", 1.0),
        ("SELECT 1, 2 UNION ALL SELECT 3, 4", "SELECT 2, 1 UNION ALL SELECT 3, 4", 0.0),
        ("SELECT 1, 2 UNION ALL SELECT 2, 1", "SELECT 1, 2 UNION ALL SELECT 2, 1", 1.0),
        ("SELECT 1, 2 UNION ALL SELECT 2, 3", "SELECT 1, 3 UNION ALL SELECT 2, 2", 0.0),
        // Each column is used once.
        ("SELECT name, price FROM item", "SELECT name, name FROM item", 0.0),
        ("SELECT name, name, price FROM item", "SELECT name, price, price FROM item", 0.0),
        ("SELECT name, name, price FROM item", "SELECT price, name, name FROM item", 1.0),
        ("SELECT name, price FROM item", "SELECT price, name, stock FROM item", 0.0),
        ("SELECT name FROM item WHERE 0", "SELECT name, price FROM item WHERE 0", 1.0),
    ] {
        let components = any.score(&scorer_input(answer, task(gold))).await.unwrap();
        assert_eq!(components[0].value, score, "{gold}\n{answer}");
    }
    let components = fixed
        .score(&scorer_input("SELECT price, name FROM item", task("SELECT name, price FROM item")))
        .await;
    assert_eq!(components.unwrap()[0].value, 0.0);
}

#[tokio::test]
async fn results_are_limited_in_rows_and_bytes() {
    let dir = database_dir();
    let scorer = scorer(dir.path());
    let many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000000)";
    for (answer, runs) in [
        // At most one row more than expected is read.
        (format!("{many} SELECT i FROM n"), 1.0),
        (format!("{many} SELECT zeroblob(100000) FROM n"), 1.0),
        ("SELECT hex(zeroblob(1000000))".into(), 0.0),
        ("SELECT zeroblob(1000000)".into(), 0.0),
        (format!("{many} SELECT group_concat(hex(zeroblob(1000))) FROM n"), 0.0),
        (
            "WITH RECURSIVE t(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM t) SELECT max(s) \
             FROM t"
                .into(),
            0.0,
        ),
        (format!("SELECT {}1", "length(hex(zeroblob(60000))) + ".repeat(3000)), 0.0),
    ] {
        let started = Instant::now();
        let components = scorer
            .score(&scorer_input(
                &answer,
                task(
                    "SELECT name FROM \
                                                                   item",
                ),
            ))
            .await
            .unwrap();
        let shown = &answer[..answer.len().min(80)];
        assert_eq!((components[0].value, components[1].value), (0.0, runs), "{shown}");
        assert!(started.elapsed() < Duration::from_secs(30), "{shown}");
    }
    // The size of all rows is limited, for the expected query and for an answer.
    let wide = format!(
        "{} LIMIT 90",
        many.replace(" LIMIT 100000000)", ") SELECT hex(zeroblob(50000)) FROM n")
    );
    let small = SqlScorer { result_mb: 8, ..scorer.clone() };
    let error = small.score(&scorer_input("SELECT 1", task(&wide))).await.unwrap_err().to_string();
    assert!(error.contains("the rows of the result have more than 8388608 bytes"), "{error}");
    assert_eq!(scorer.score(&scorer_input(&wide, task(&wide))).await.unwrap()[0].value, 1.0);
    let numbers = format!("{} LIMIT 90", many.replace(" LIMIT 100000000)", ") SELECT i FROM n"));
    let components = small.score(&scorer_input(&wide, task(&numbers))).await.unwrap();
    assert_eq!((components[0].value, components[1].value), (0.0, 0.0));
    // An answer may contain values as long as those of the expected query.
    let long = "SELECT hex(zeroblob(200000))";
    assert_eq!(scorer.score(&scorer_input(long, task(long))).await.unwrap()[0].value, 1.0);
}

#[tokio::test]
async fn row_memory_is_limited_by_columns_and_functions() {
    let dir = database_dir();
    let scorer = scorer(dir.path());
    let many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)";
    let wide = format!("SELECT {} x FROM (SELECT randomblob(130000) AS x)", "x, ".repeat(1500));
    let columns: Vec<String> = (0..800).map(|at| format!("1 a{at}")).collect();
    let columns = columns.join(",");
    for answer in [
        format!("{many} SELECT json_group_array(hex(randomblob(60000))) FROM n"),
        format!("{many} SELECT \"JSON_GROUP_OBJECT\"(i, hex(zeroblob(60000))) FROM n"),
        format!("{many} SELECT length(jsonb_group_array(i)) FROM n"),
        wide.clone(),
        format!("SELECT count(*) FROM ({wide})"),
        format!("SELECT * FROM (SELECT {columns})"),
    ] {
        let started = Instant::now();
        let components =
            scorer.score(&scorer_input(&answer, task("SELECT name FROM item"))).await.unwrap();
        assert_eq!(
            (components[0].value, components[1].value),
            (0.0, 0.0),
            "{}",
            &answer[..answer.len().min(80)]
        );
        assert!(started.elapsed() < Duration::from_secs(5), "{}", &answer[..answer.len().min(80)]);
    }
    // An answer may be as wide as the expected query.
    let wide = format!("SELECT {columns}");
    assert_eq!(scorer.score(&scorer_input(&wide, task(&wide))).await.unwrap()[0].value, 1.0);
    let collects = task("SELECT json_group_array(name) FROM item");
    let error = scorer.check_task(&collects).unwrap_err().to_string();
    assert!(error.contains("memory use is unlimited"), "{error}");
}

#[tokio::test]
async fn query_cannot_write_attach_or_exceed_limits() {
    let dir = database_dir();
    let scorer = SqlScorer { seconds: 1.0, ..scorer(dir.path()) };
    let shop = dir.path().join("shop.sqlite");
    let before = std::fs::read(&shop).unwrap();
    let copy = dir.path().join("copy.sqlite");
    let zoo = dir.path().join("zoo/zoo.sqlite");
    for query in [
        "DELETE FROM item".to_owned(),
        "DROP TABLE item".into(),
        "SELECT 1; DELETE FROM item".into(),
        "PRAGMA writable_schema = 1".into(),
        format!("ATTACH '{}' AS other", zoo.display()),
        format!("VACUUM INTO '{}'", copy.display()),
        "SELECT load_extension('/tmp/x')".into(),
        "SELECT zeroblob(1000000000)".into(),
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n".into(),
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
            .into(),
    ] {
        let started = Instant::now();
        let components =
            scorer.score(&scorer_input(&query, task("SELECT name FROM item"))).await.unwrap();
        assert_eq!(components[0].value, 0.0, "{query}");
        assert!(started.elapsed() < Duration::from_secs(20), "{query}");
    }
    assert!(!copy.exists());
    assert_eq!(std::fs::read(&shop).unwrap(), before);
}

#[test]
fn check_task_rejects_invalid_database_or_query() {
    let dir = database_dir();
    let scorer = scorer(dir.path());
    let named = |name: &str, gold: &str| json!({ "answer": gold, "db_id": name });
    scorer.check_task(&named("zoo", "SELECT name FROM item")).unwrap();
    for (task, want) in [
        (named("bank", "SELECT 1"), "has no database bank"),
        (named("../shop", "SELECT 1"), "which is not the name of a database"),
        (named("", "SELECT 1"), "which is not the name of a database"),
        (named("shop", "SELECT colour FROM item"), "no such column"),
        (named("shop", "DELETE FROM item"), "the query would write"),
        (named("shop", ""), "is not a query"),
    ] {
        let error = scorer.check_task(&task).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
    let one = SqlScorer { databases: dir.path().join("shop.sqlite"), ..scorer.clone() };
    one.check_task(&json!({ "answer": "SELECT 1" })).unwrap();
    let none = SqlScorer { databases: "/no/such.sqlite".into(), ..scorer };
    assert!(
        none.check_task(&json!({ "answer": "SELECT 1" }))
            .unwrap_err()
            .to_string()
            .contains("/no/such.sqlite")
    );
}

#[test]
fn orders_rows_detects_outer_order_by() {
    for (query, ordered) in [
        ("SELECT a FROM t ORDER BY a", true),
        ("select a from t order\n by a limit 1", true),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 3)", false),
        ("SELECT 'x order by' FROM t -- order by", false),
        ("SELECT 'x' FROM t /* order by */", false),
        ("SELECT a / 2 FROM t /* by a */ ORDER /**/ BY a", true),
        ("SELECT \"order\", by_x FROM t", false),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", false),
    ] {
        assert_eq!(orders_rows(query), ordered, "{query}");
    }
}
