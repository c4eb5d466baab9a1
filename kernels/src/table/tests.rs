use super::*;

#[test]
fn tables_are_zero_apart_and_writable() {
    let mut tables: Vec<Table<[u16; 16]>> = [0, 1, 3, 1000, 400_000].map(Table::zeroed).into();
    for (i, table) in tables.iter_mut().enumerate() {
        assert!(table.iter().all(|row| *row == [0; 16]), "fresh memory is zero");
        table.fill([i as u16 + 1; 16]);
    }
    for (i, table) in tables.iter().enumerate() {
        assert!(table.iter().all(|row| *row == [i as u16 + 1; 16]), "nobody writes into another's table");
        assert!(table.as_ptr().addr().is_multiple_of(ALIGN));
    }
}

#[test]
fn a_table_outlives_its_neighbours() {
    let neighbours: Vec<Table<f32>> = (0..100).map(|_| Table::zeroed(100_000)).collect();
    let mut kept: Table<f32> = Table::zeroed(100);
    kept.fill(2.0);
    drop(neighbours);
    assert!(kept.iter().all(|x| *x == 2.0));
}
